"""A local server that speaks OpenAI's chat protocol and answers as a judge does, or as one that is broken."""

import asyncio
import contextlib
import json
import re
import threading

from aiohttp import web

# The answer that is judged, between the lines around it.
QUOTED = re.compile(r"\[answer (\w+)\]\n(.*)\n\[end of answer \1\]", re.DOTALL)
FORM = re.compile(r"on a line of its own: (\{.*\})")


class JudgeServer:
    """Scores an answer by its length. `answers`: text of an answer -> what the server does instead."""

    def __init__(self):
        self.answers = {}
        self.requests = []  # (headers, body)
        self.texts = []
        self.now = 0

    def reply(self, system, user):
        """A text, a response, or a coroutine function for either."""
        text = QUOTED.search(user)[2]
        self.texts.append(text)
        return self.answers.get(text, self.score(system, user))

    def score(self, system, user):
        text = QUOTED.search(user)[2]
        scores = dict.fromkeys(re.findall(r'"(\w+)": NUMBER', FORM.search(system)[1]), min(len(text), 10))
        return f"I have read {text!r}.\n{json.dumps(scores)}"

    async def _chat(self, request):
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        system, user = (message["content"] for message in body["messages"])
        self.now += 1
        try:
            reply = self.reply(system, user)
            if callable(reply):
                reply = await reply()
            if reply is None:
                reply = self.score(system, user)
            if isinstance(reply, web.Response):
                return reply
        finally:
            self.now -= 1
        message = {"role": "assistant", "content": reply}
        return web.json_response({"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    @contextlib.asynccontextmanager
    async def serve(self):
        """The base address."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def serve_in_thread(self):
        """The base address, for a program whose main thread runs a loop of its own."""
        with contextlib.ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner())
            loop, ready, end = runner.get_loop(), threading.Event(), asyncio.Event()
            found = []

            async def hold():
                async with self.serve() as url:
                    found.append(url)
                    ready.set()
                    await end.wait()

            thread = threading.Thread(target=runner.run, args=(hold(),))
            thread.start()
            try:
                assert ready.wait(20)
                yield found[0]
            finally:
                loop.call_soon_threadsafe(end.set)
                thread.join()
