"""What only a GPU can show, and `pytest -m gpu` does not, in one file: each claim in a process of its own, with a deadline.

    python tools/gpu_check.py                                      # on the first card; at most nine minutes
    python tools/gpu_check.py --device cpu                         # the same code where there is no card, as CI runs it
    python tools/gpu_check.py --only gate,decode --out found.jsonl

Prints one JSON object a line: {claim, predicted, found, verdict, numbers, seconds}, and a summary. Verdicts: `right` and `wrong`
of what is predicted here, `measured` where a number is the answer, `skipped` with the reason, and `died` or `late` of a process.
The exit code is 1 where a claim is wrong, died or came late. Claims that take no time run beside each other; those that measure
run alone. The Python packages of the project have to be installed; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.models.attention.tree import TreePlan
    from asyncrl.models.policy import PolicyModel

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples/quickstart.yaml"
NATS = {"float32": 1e-3, "bfloat16": 0.05}  # mean mismatch of trainer and sampler under one version
H100_BFLOAT16 = 989e12  # FLOP/s by NVIDIA's data sheet, dense; the H200 has the same


@dataclass(frozen=True)
class Found:
    """`right`: whether what was predicted holds; None: a number is the answer."""

    text: str
    right: bool | None = None
    numbers: dict[str, Any] | None = None


class Skip(Exception):
    """The claim says nothing on this device."""


@dataclass(frozen=True)
class Claim:
    check: Callable[[str], Found]
    predicted: str
    seconds: int  # deadline
    alone: bool  # nothing may run beside it


CLAIMS: dict[str, Claim] = {}
# Claims are forked from a process that has imported torch once and never touches a device.
FORKED = multiprocessing.get_context("forkserver")


def claim(predicted: str, seconds: int = 60, *, alone: bool = False) -> Callable[[Callable[[str], Found]], None]:
    def enter(check: Callable[[str], Found]) -> None:
        CLAIMS[check.__name__] = Claim(check, predicted, seconds, alone)

    return enter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="", help="claims, by name, with commas")
    parser.add_argument("--out", type=Path, help="write the lines here too")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    FORKED.set_forkserver_preload(["torch", "transformers", "asyncrl.training.trainer"])
    names = [name for name in options.only.split(",") if name] or list(CLAIMS)
    if unknown := sorted(set(names) - set(CLAIMS)):
        parser.error(f"no claim is named {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    together = [name for name in names if not CLAIMS[name].alone]
    with concurrent.futures.ThreadPoolExecutor(1 if options.device == "cpu" else 4) as pool:
        for done in concurrent.futures.as_completed([pool.submit(ask, name, options.device) for name in together]):
            report(done.result())
    for name in names:
        if CLAIMS[name].alone:
            report(ask(name, options.device))
    counts = {
        kind: sum(line["verdict"] == kind for line in lines) for kind in dict.fromkeys(x["verdict"] for x in lines)
    }
    print(f"{len(lines)} claims: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)
    return int(any(counts.get(kind) for kind in ("wrong", "died", "late")))


def ask(name: str, device: str) -> dict[str, Any]:
    """The line of one claim."""
    asked, started = CLAIMS[name], time.monotonic()
    line: dict[str, Any] = {"claim": name, "predicted": asked.predicted}
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "answer"), Path(folder, "errors")
        process = FORKED.Process(target=answer, args=(name, device, *paths))
        process.start()
        process.join(asked.seconds)
        late = process.exitcode is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        found, errors = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
    if late:
        return line | {"found": f"no answer in {asked.seconds} s; {last_words(errors)}", "verdict": "late"}
    seconds = {"seconds": round(time.monotonic() - started, 1)}
    if process.exitcode or not found:
        return line | {"found": f"exit code {process.exitcode}; {last_words(errors)}", "verdict": "died"} | seconds
    return {**line, **json.loads(found), **seconds}


def last_words(errors: str) -> str:
    return " | ".join(errors.strip().splitlines()[-12:])[-1800:]


def answer(name: str, device: str, path: Path, errors: Path) -> None:
    """In the process of one claim, which leads a process group."""
    os.setsid()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")
    try:
        found = CLAIMS[name].check(device)
    except Skip as reason:
        line: dict[str, Any] = {"found": str(reason), "verdict": "skipped"}
    else:
        verdict = {None: "measured", True: "right", False: "wrong"}[found.right]
        line = {"found": found.text, "verdict": verdict, "numbers": found.numbers or {}}
    path.write_text(json.dumps(line), encoding="utf-8")


# -- what the claims share ---------------------------------------------------------------------------------------------


def require_card(device: str) -> None:
    if device == "cpu":
        raise Skip("says nothing on a CPU")


def child(code: str, *arguments: str, seconds: int = 60, **environment: str) -> str:
    """What a fresh process prints. Errors: RuntimeError with its last lines."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=seconds, cwd=ROOT,
        env=os.environ | environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}; {last_words(done.stderr)}")
    return done.stdout


def train(device: str, *overrides: str) -> tuple[Any, list[dict[str, float]]]:
    """A run of the quickstart: its summary, and the metrics of each step."""
    import asyncio

    from asyncrl import Runtime, load_config

    async def run() -> Any:
        config = load_config([QUICKSTART], [f"model.device={device}", "telemetry.live=off", *overrides])
        async with Runtime(config, write=False) as runtime:
            return await runtime.run()

    summary = asyncio.run(run())
    return summary, [metrics for _, metrics in summary.history if "reward/mean" in metrics]


def judged(steps: list[dict[str, float]], dtype: str) -> tuple[bool, dict[str, Any]]:
    gaps = [step["mismatch/current_mean"] for step in steps if step.get("mismatch/current_tokens", 0)]
    mismatch = sum(gaps) / len(gaps) if gaps else math.nan
    numbers = {
        "steps": len(steps), "mismatch": mismatch, "reward_first": steps[0]["reward/mean"],
        "reward_last": steps[-1]["reward/mean"], "norm_last": steps[-1].get("grad_norm"),
    }  # fmt: skip
    return all(math.isfinite(step["loss"]) for step in steps) and mismatch < NATS[dtype], numbers


def policy_on(device: str, dtype: str, layers: int = 28, *, served: bool = False) -> PolicyModel:
    """Random weights in Qwen3-0.6B's shape; on a CPU in a small one."""
    import torch
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    from asyncrl.models.policy import PolicyModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": layers,
    }  # fmt: skip
    if device == "cpu":
        sizes |= {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 64, "num_hidden_layers": 2,
        }  # fmt: skip
    with torch.device(device):
        module = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=32768, tie_word_embeddings=True))
    return PolicyModel(module.float(), dtype, served=served)


def synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def milliseconds(device: str, call: Callable[[], Any], times: int = 10, warm: int = 3) -> float:
    """The median of calls that are each waited for."""
    taken = []
    for number in range(warm + times):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        if number >= warm:
            taken.append(1e3 * (time.perf_counter() - started))
    return sorted(taken)[len(taken) // 2]


def kernels(call: Callable[[], Any]) -> tuple[dict[str, int], int, float]:
    """Of one call: launches of each kernel, waits of the host, and the milliseconds of all kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    launched: dict[str, int] = {}
    waits, busy = -1, 0.0  # without the wait above
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            launched[event.name] = launched.get(event.name, 0) + 1
            busy += event.time_range.elapsed_us() / 1e3
        waits += event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    return launched, waits, busy


# -- claims that take no time of their own -----------------------------------------------------------------------------


@claim("torch finds the device; transformers, triton and the card have versions")
def versions(device: str) -> Found:
    import torch
    import transformers

    numbers: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device != "cpu":
        import triton

        properties = torch.cuda.get_device_properties(device)
        numbers |= {
            "card": properties.name, "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        }  # fmt: skip
    return Found("versions", None, numbers)


@claim("a masked backward in bfloat16 is finite, large activations and key lengths of 64 mod 128 included")
def finite_gradients(device: str) -> Found:
    require_card(device)
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def broken(backend: SDPBackend | None) -> str:
        bad = 0
        for length in range(64, 1088, 128):
            for size in (1.0, 30.0, 300.0):
                torch.manual_seed(length)
                wide = [torch.randn(4, 16, length, 128, device=device) for _ in range(3)]
                wide[1][..., 0] *= size
                q, k, v = leaves = [part.to(torch.bfloat16).requires_grad_() for part in wide]
                mask = torch.ones(4, 1, length, length, dtype=torch.bool, device=device).tril()
                mask[:, :, :, length - 30 :] &= torch.eye(length, dtype=torch.bool, device=device)[:, length - 30 :]
                try:
                    if backend is None:
                        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                    else:
                        with sdpa_kernel(backend):
                            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
                except RuntimeError as error:
                    return str(error).splitlines()[0][:80]
                bad += not all(bool(part.isfinite().all()) for part in grads)
        return f"{bad} of 24"

    from asyncrl.models.attention.interface import register

    numbers = {"torch's own choice": broken(None), "cudnn": broken(SDPBackend.CUDNN_ATTENTION)}
    register()  # what a run does before it loads a model
    numbers["as in a run"] = broken(None)
    numbers["cudnn chosen in a run"] = torch.backends.cuda.cudnn_sdp_enabled()
    right = numbers["as in a run"] == "0 of 24" and not numbers["cudnn chosen in a run"]
    return Found(f"not finite: {numbers['as in a run']} as in a run", right, numbers)


@claim("the gate passes a model on the device, also where TF32 is allowed; where it is forced, that is named", 120)
def gate(device: str) -> Found:
    code = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, "examples")
import torch
from quickstart_model import build
from asyncrl.runtime.gate import check_model
verdict = check_model(build(0)[0], sys.argv[1])
print("|".join(str(result) for result in verdict.results))
"""
    numbers = {"plain": child(code, device).strip()}
    right = numbers["plain"].startswith("fused: training log-probs")
    if device != "cpu":
        numbers["TF32 allowed"] = child(
            "import torch; torch.set_float32_matmul_precision('high')\n" + code, device
        ).strip()
        right = right and numbers["TF32 allowed"].startswith("fused: training log-probs")
        try:
            numbers["TF32 forced"] = child(code, device, NVIDIA_TF32_OVERRIDE="1").strip()
        except RuntimeError as error:
            numbers["TF32 forced"] = str(error)[-300:]
        right = right and "NVIDIA_TF32_OVERRIDE" in numbers["TF32 forced"]
    return Found("; ".join(f"{name}: {text}" for name, text in numbers.items()), right)


@claim("the quickstart learns in float32, and trainer and sampler agree", 150)
def quickstart_float32(device: str) -> Found:
    return learns(device, "float32")


@claim("the quickstart learns in bfloat16, and trainer and sampler agree", 150)
def quickstart_bfloat16(device: str) -> Found:
    return learns(device, "bfloat16")


def learns(device: str, dtype: str) -> Found:
    steps = 3 if device == "cpu" else 40
    _, found = train(device, f"model.dtype={dtype}", f"train.max_steps={steps}")
    right, numbers = judged(found, dtype)
    if device != "cpu":
        right = right and numbers["reward_last"] > numbers["reward_first"] + 0.05
    return Found(f"reward {numbers['reward_first']:.3f} -> {numbers['reward_last']:.3f}", right, numbers)


@claim("two runs with preset=sync and one seed: equal losses to the last bit", 150)
def reruns(device: str) -> Found:
    more = ["preset=sync", f"train.max_steps={2 if device == 'cpu' else 4}"]
    first, second = ([step["loss"] for step in train(device, *more)[1]] for _ in range(2))
    gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
    numbers = {"first": first, "second": second}
    return Found(f"largest difference {gap:.1e}", gap == 0 if device == "cpu" else None, numbers)


# -- claims that measure -----------------------------------------------------------------------------------------------


def tree(tokens: int, members: int = 8, prompt: int = 256) -> TreePlan:
    """A plan of about `tokens` tokens: prompts with `members` ragged completions each, 64 to 512 tokens long."""
    import numpy as np

    from asyncrl.models.attention.tree import TreePlan

    draw = np.random.default_rng(0)
    lengths, parents = list[int](), list[int]()
    while sum(lengths) < max(tokens, 1):
        parents += [-1, *[len(lengths)] * members]
        lengths += [prompt, *draw.integers(prompt // 4, 2 * prompt, members).tolist()]
    return TreePlan(lengths, parents)


@claim("tree attention in training: time, kernels, memory, gradients against float64", 120, alone=True)
def tree_attention(device: str) -> Found:
    import torch

    from asyncrl.models.attention.interface import register

    register()
    torch.manual_seed(0)
    numbers: dict[str, Any] = {}
    shares = []
    sizes = (200,) if device == "cpu" else (2048, 16384)
    heads, kv_heads, size = (4, 2, 16) if device == "cpu" else (16, 8, 128)
    for tokens in sizes:
        plan = tree(tokens, prompt=16 if device == "cpu" else 256)
        inputs = [torch.randn(plan.tokens, n, size, device=device) for n in (heads, kv_heads, kv_heads)]
        weight = torch.randn(plan.tokens, heads, size, device=device)
        exact = gradients(plan, inputs, weight, torch.float64) if plan.tokens < 6000 else None
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{plan.tokens} {str(dtype).removeprefix('torch.')}"
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            try:
                found = gradients(plan, inputs, weight, dtype)
                numbers[f"{name} ms"] = round(
                    milliseconds(device, partial(gradients, plan, inputs, weight, dtype), 5), 2
                )
            except torch.OutOfMemoryError:
                numbers[f"{name} ms"] = "out of memory"
                continue
            masked = partial(gradients, plan, inputs, weight, dtype, masked=True)
            if plan.tokens < 6000:
                numbers[f"{name} masked ms"] = round(milliseconds(device, masked, 3, 1), 2)
            if device != "cpu":
                numbers[f"{name} peak MiB"] = (torch.cuda.max_memory_allocated() - before) >> 20
                launched, *_ = kernels(partial(gradients, plan, inputs, weight, dtype))
                numbers[f"{name} launches"] = sum(launched.values())
                longest = sorted(launched, key=lambda n: -len(n))
                numbers[f"{name} kernels"] = sorted(
                    {n[:60] for n in longest if "fmha" in n or "flash" in n or "sdpa" in n}
                )
            if exact is not None:
                errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)]
                far = numbers[f"{name} gap"] = float(torch.stack(errors).max())
                shares.append(far / (2e-5 if dtype == torch.float32 else 0.02))
    # NaN is not below 1.
    return Found("forward and backward of one layer", all(share < 1 for share in shares), numbers)


def gradients(plan: TreePlan, inputs: list[Any], weight: Any, dtype: Any, *, masked: bool = False) -> list[Any]:
    """Output and gradients of (query, key, value). `masked`: by the general fallback."""
    import torch

    from asyncrl.models.attention.tree import PaddedRows

    q, k, v = leaves = [part.to(dtype).requires_grad_() for part in inputs]
    scaling = q.shape[-1] ** -0.5
    out = PaddedRows(plan.rows, q.device).attend(q, k, v, scaling) if masked else plan.attend(0, q, k, v, scaling)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(dtype))]


@claim(
    "new shapes of attention cost no more than known ones, and no memory outside of torch's allocator", 120, alone=True
)
def new_shapes(device: str) -> Found:
    require_card(device)
    import torch

    from asyncrl.models.attention.interface import register

    attention = torch.nn.functional.scaled_dot_product_attention

    def measure() -> dict[str, Any]:
        taken, known, used = list[float](), list[float](), torch.cuda.mem_get_info()[0]
        for number in range(100):
            length = 300 + 3 * number
            q = torch.randn(32, 8, 2, 128, device=device, dtype=torch.bfloat16)
            k = torch.randn(32, 8, length, 128, device=device, dtype=torch.bfloat16)
            mask = torch.zeros(32, 1, 1, length, device=device, dtype=torch.bfloat16)
            for times in (taken, known):
                torch.cuda.synchronize()
                started = time.perf_counter()
                attention(q, k, k, attn_mask=mask)
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - started))
        middle = len(taken) // 2
        return {
            "first_ms": taken[0], "new_ms": sorted(taken)[middle], "known_ms": sorted(known)[middle],
            "mib": (used - torch.cuda.mem_get_info()[0]) >> 20,
        }  # fmt: skip

    numbers = {"torch's own choice": measure()}
    register()
    numbers["as in a run"] = run = measure()
    return Found(
        f"{run['new_ms']:.2f} ms new, {run['known_ms']:.2f} ms known", run["new_ms"] < 3 * run["known_ms"], numbers
    )


@claim(
    "a decode step of a 0.6B model at 64 and 256 ragged rows: time, launches a layer, waits of the host",
    150,
    alone=True,
)
def decode(device: str) -> Found:
    import numpy as np

    from asyncrl.generation.embedded.cache import KVCache
    from asyncrl.generation.embedded.core import Core
    from asyncrl.generation.embedded.engine import cache_shape
    from asyncrl.generation.embedded.sequences import Sequences
    from asyncrl.types import GenerationRequest, SamplingParams

    policy = policy_on(device, "float32" if device == "cpu" else "bfloat16")
    layers = policy.config.num_hidden_layers
    numbers: dict[str, Any] = {}
    for rows in (4,) if device == "cpu" else (64, 256):
        longest, steps = (40, 8) if device == "cpu" else (1100, 40)
        shape = cache_shape(policy.config, rows, longest + steps)
        cache, columns = KVCache(shape, policy.dtype, policy.device), Sequences(rows, shape.positions)
        cache.data.fill_(0.01)
        core = Core(policy, cache, columns, prefill_tokens=1, recompute=False)
        for number, context in enumerate(np.random.default_rng(0).integers(longest // 4, longest, rows).tolist()):
            sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
            request = GenerationRequest(np.full(context, 7, np.int32), sampling, seed=number)
            columns.cached[core.add(request, ())] = context - 1
        numbers[f"{rows} rows ms"] = round(milliseconds(device, core.decode, 5, 2), 2)
        if device != "cpu":
            numbers[f"{rows} rows captured"] = core.graphs is not None and not core.graphs.failed
            launched, waits, busy = kernels(core.decode)
            numbers[f"{rows} rows kernels ms"] = round(busy, 2)
            numbers[f"{rows} rows launches a layer"] = round(sum(launched.values()) / layers, 1)
            numbers[f"{rows} rows waits"] = waits
    return Found("decode steps, embedded engine", None, numbers)


def random_group(number: int, prompt_length: int, members: int, vocabulary: int, draw: Any) -> Any:
    """A group with advantages; completions of half to twice the length of the prompt."""
    import numpy as np

    from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory

    prompt = draw.integers(0, vocabulary, prompt_length).astype(np.int32)
    made = []
    for member in range(members):
        own = draw.integers(0, vocabulary, int(draw.integers(prompt_length // 2, 2 * prompt_length))).astype(np.int32)
        tokens = np.concatenate([prompt, own])
        mask = np.arange(tokens.size) >= prompt.size
        logprobs = np.where(mask, np.float32(-1), np.float32(0))
        made.append(
            Trajectory(
                group_id=number, member=member, group_size=members, prompt_length=prompt.size, tokens=tokens, mask=mask,
                logprobs=logprobs, sampled_logprobs=logprobs, versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0, finish_reason=FinishReason.LENGTH,
            )
        )  # fmt: skip
    return Group(Ticket(number, 0, 0), Prompt(number, prompt, ""), tuple(made)), np.linspace(-1, 1, members).tolist()


@claim(
    "a lane finds how long the device takes for a closure that returns at once, and counts that as busy", 60, alone=True
)
def device_time(device: str) -> Found:
    """The same kernels twice: the closure waits for its kernel, which measures the kernel's length; and the closure returns."""
    require_card(device)
    import asyncio
    from functools import partial

    import torch

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.telemetry.budget import lane_budget
    from asyncrl.telemetry.recorder import Recorder

    rounds = 20

    def compute(waits: bool) -> float:
        started = time.perf_counter()
        torch.cuda._sleep(50_000_000)  # cycles: about 30 ms
        if waits:
            synchronize(device)
        return time.perf_counter() - started

    async def measure(waits: bool) -> tuple[float, float, float, float, float]:
        """Medians in ms of the closure on the host and of its event; busy seconds and wall seconds; error of the clock in ms."""
        recorder, host = Recorder(nvtx=False), list[float]()

        def on_start() -> None:
            torch.cuda.set_device(device)
            recorder.register_device("card", partial(torch.cuda.Event, enable_timing=True))

        async with ThreadLane("card", recorder, on_start) as lane:
            for number in range(3 + rounds):
                if number == 3:
                    recorder.take_window()
                host.append(await lane.run(partial(compute, waits), name="kernel"))
                synchronize(device)
                await asyncio.sleep(0.03)
            window = recorder.take_window()
        found = sorted(event.duration for event in recorder.events() if event.name == "kernel")
        busy = lane_budget(window, "card").busy["kernel"]
        clock = recorder.drain()["lane/device_clock_ms"]
        middle = len(host) // 2
        return 1e3 * sorted(host)[middle], 1e3 * found[middle], busy, window.end - window.start, clock

    numbers: dict[str, Any] = {}
    length, found, busy, wall, numbers["clock ms, host waits"] = asyncio.run(measure(True))
    numbers |= {"kernel ms": round(length, 3), "found ms, host waits": round(found, 3)}
    numbers["busy, host waits"] = round(busy / wall, 4)
    launch, later, busy, wall, numbers["clock ms"] = asyncio.run(measure(False))
    expected = rounds * length / 1e3 / wall
    numbers |= {"launch ms": round(launch, 3), "found ms": round(later, 3), "busy": round(busy / wall, 4)}
    numbers["busy expected"] = round(expected, 4)
    right = max(abs(found / length - 1), abs(later / length - 1), abs(busy / wall / expected - 1)) < 0.03
    text = f"a kernel of {length:.2f} ms is {later:.2f} ms; busy {busy / wall:.3f} where {expected:.3f} is expected"
    return Found(text, right and launch < length / 5, numbers)


@claim(
    "a training microbatch of a 0.6B model at 2k and 16k tokens: time, share of the card's FLOP, launches a layer",
    150,
    alone=True,
)
def microbatch(device: str) -> Found:
    import numpy as np
    import torch

    from asyncrl.algorithms.registry import build_loss
    from asyncrl.config.schema import TrainConfig
    from asyncrl.data.packing import pack_groups
    from asyncrl.training.trainer import TorchTrainer

    policy = policy_on(device, "float32" if device == "cpu" else "bfloat16")
    vocabulary, layers = policy.head.out_features, policy.config.num_hidden_layers
    trainer = TorchTrainer(policy, TrainConfig(lr=1e-6), max_completion_length=1024)
    loss, numbers = build_loss("grpo"), dict[str, Any]()
    for budget in (100,) if device == "cpu" else (2048, 16384):
        draw, groups, total = np.random.default_rng(0), list[Any](), 0
        prompt_length = 8 if device == "cpu" else 128
        while total < budget - 8 * prompt_length:
            groups.append(random_group(len(groups), prompt_length, 8, vocabulary, draw))
            total += sum(member.tokens.size - prompt_length for member in groups[-1][0].trajectories) + prompt_length
        batches = pack_groups(groups, 2 * budget)
        tokens = sum(len(batch.tokens) for batch in batches)

        def step(batches: Any = batches) -> None:
            trainer.begin_train_step(loss)
            for batch in batches:
                trainer.train_microbatch(batch)
            synchronize(device)
            trainer.abort_train_step()

        name = f"{tokens} tokens"
        try:
            taken = milliseconds(device, step, 4, 2)
        except torch.OutOfMemoryError as error:
            numbers[f"{name} ms"] = f"out of memory: {str(error)[:120]}"
            continue
        numbers[f"{name} ms"] = round(taken, 1)
        if device != "cpu":
            flop = 6.0 * policy.matmul_parameters * tokens
            numbers[f"{name} MFU"] = round(flop / (taken / 1e3) / H100_BFLOAT16, 4)
            numbers[f"{name} peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            launched, waits, busy = kernels(step)
            numbers[f"{name} kernels ms"] = round(busy, 1)
            numbers[f"{name} launches a layer"] = round(sum(launched.values()) / layers / len(batches), 1)
            numbers[f"{name} waits"] = waits
            most = sorted(launched.items(), key=lambda item: -item[1])[:6]
            numbers[f"{name} most launched"] = {kernel[:80]: count for kernel, count in most}
    return Found("forward, loss and backward", None, numbers)


@claim("rows padded by an index cost no more in backward than rows that are scattered", 90, alone=True)
def padding(device: str) -> Found:
    import torch

    plan = tree(200 if device == "cpu" else 4096, prompt=16 if device == "cpu" else 256)
    heads, size = (2, 16) if device == "cpu" else (8, 128)
    source = torch.randn(plan.tokens, heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    rows = plan.sequences()
    longest = max(row.size for row in rows)
    index = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        index[number, : row.size] = torch.from_numpy(row)
    index = index.to(device)
    grad = torch.randn(*index.shape, heads, size, device=device, dtype=torch.bfloat16)
    by_index = milliseconds(device, lambda: torch.autograd.grad(source[index], source, grad), 5)
    by_select = milliseconds(
        device, lambda: torch.autograd.grad(source.index_select(0, index.flatten()), source, grad.flatten(0, 1)), 5
    )
    numbers = {
        "index ms": round(by_index, 3),
        "index_select ms": round(by_select, 3),
        "rows": len(rows),
        "longest": longest,
    }
    return Found("backward of one tensor", None, numbers)


@claim("torch's kernel for ragged rows, windows included, gives what float64 gives", 90)
def ragged_kernel(device: str) -> Found:
    require_card(device)
    import torch

    from asyncrl.models.attention.ragged import FlashKernel, kernel_for, largest_error

    numbers: dict[str, Any] = {}
    for size in (32, 64, 80, 128, 256):
        numbers[f"head size {size}"] = largest_error(FlashKernel(), torch.device(device), torch.bfloat16, size)
    chosen = kernel_for(torch.device(device), torch.bfloat16, 128) is not None
    return Found(f"at most {max(numbers.values()):.1e}, chosen: {chosen}", chosen, numbers)


if __name__ == "__main__":
    sys.exit(main())
