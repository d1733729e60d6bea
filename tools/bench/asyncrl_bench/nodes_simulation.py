"""Thousands of nodes in virtual time (simulation.py): the part of `asyncrl bench nodes` about the size of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .command import Place, option, positive
from .plots import markdown, plot
from .simulated_line import MESSAGE_S
from .simulation import Plan, Result, simulate

CASES = {"balanced": 1.0, "too many nodes": 0.7, "too few nodes": 1.4}  # -> speed of the training ranks
OPTIONS = (
    option("--simulated", [1, 4, 16, 64, 256], "simulated numbers of nodes", [4], nargs="+", type=positive),
    option("--unbalanced", 64, "most nodes of the cases in which training and generation differ", 1),
    option("--only-simulated", False, "simulate, and measure nothing else"),
)


def measure_simulation(place: Place) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs, and the tables. `place.options` has `OPTIONS`."""
    runs = list[dict[str, Any]]()
    for nodes in place.options.simulated:
        for case, training in CASES.items():
            if case != "balanced" and nodes > place.options.unbalanced:
                continue
            place.say(f"simulated: {nodes} nodes, {case}")
            # Small runs vary, so more of their steps count.
            plan = Plan(nodes, training=training, steps=max(3, 128 // nodes))
            runs.append({"nodes": nodes, "case": case, **figures(plan, simulate(plan).result)})
            if place.options.only_simulated:
                place.write(simulation=runs)
    return runs, table(runs)


def figures(plan: Plan, result: Result) -> dict[str, Any]:
    groups, ages = result.ages.total(), result.ages
    return {
        "trainers": plan.trainers,
        "ideal_tokens_per_s": plan.ideal,
        "tokens_per_s": result.tokens / result.seconds,
        "share": result.tokens / result.seconds / plan.ideal,
        "groups_per_s": groups / result.seconds,
        "age_mean": sum(age * count for age, count in ages.items()) / groups,
        "age_max": max(ages),
        "age_bound": plan.max_staleness,
        "seats": result.generating,
        "training": result.training,
        "load": result.load,
        "messages": {kind: count / groups for kind, count in result.handled.most_common()},
        "virtual_s": result.seconds,
        "wall_s": result.wall_s,
    }


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for run in runs:
        seats, training = run["seats"], run["training"]
        causes = [seats.get(cause, 0.0) for cause in ("training", "weights", "rank 0", "last of its groups")]
        waits = [training.get(f"idle/{cause}", 0.0) for cause in ("group", "other ranks", "publish")]
        shares = [run["share"], seats["busy"], *causes, training["busy/train"], *waits]
        ages = f"{run['age_mean']:.1f}, {run['age_max']} of {run['age_bound']}"
        row = [run["nodes"], run["trainers"], run["case"], f"{shares[0]:.0%}", ages]
        row += [f"{share:.0%}" for share in shares[1:]]
        rows.append([*row, f"{run['load']:.1%}", f"{sum(run['messages'].values()):.1f}"])
    names = [
        "nodes",
        "training ranks",
        "case",
        "of ideal",
        "age: mean, most",
        "seats busy",
        "training",
        "weights",
        "rank 0",
    ]
    names += ["own groups", "training busy", "groups", "other ranks", "publish", "rank 0's load", "messages a group"]
    most = max(runs, key=lambda run: run["nodes"])
    others = sum(count for kind, count in most["messages"].items() if kind != "watch")
    return [
        *markdown(names, rows, 3),
        "",
        "The four columns behind `seats busy` are what free seats of the nodes wait for: a slot that training, or else the new "
        "weights, must free; rank 0; the end of the node's own groups. Those behind `training busy`: what training ranks wait for.",
        "",
        f"A message takes {1e6 * MESSAGE_S:.0f} us of rank 0's event loop. At {most['nodes']:,} nodes its load is "
        f"{most['load']:.1%}. Without questions for states, whose rate is limited, a group takes {others:.0f} messages, so the "
        f"loop is full at about {1 / others / MESSAGE_S:,.0f} groups a second.",
    ]


def draw(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    with plot(path, 11.0, panels=3) as (rates, idle, load):
        for case in CASES:
            of_case = [run for run in runs if run["case"] == case]
            rates.plot([run["nodes"] for run in of_case], [100 * run["share"] for run in of_case], "o-", label=case)
        balanced = [run for run in runs if run["case"] == "balanced"]
        nodes = [run["nodes"] for run in balanced]
        for side, cause in (
            ("seats", "training"),
            ("seats", "weights"),
            ("seats", "rank 0"),
            ("training", "idle/group"),
        ):
            shares = [100 * run[side].get(cause, 0.0) for run in balanced]
            name = "training waits for groups" if side == "training" else f"seats wait for {cause}"
            idle.plot(nodes, shares, "o-", label=name)
        load.plot(nodes, [100 * run["load"] for run in balanced], "o-", label="rank 0's event loop")
        titles = ("tokens/s, % of ideal", "idle, balanced, %", "load, balanced, %")
        for axes, title in zip((rates, idle, load), titles, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("generating nodes")
            axes.set_ylabel(title)
