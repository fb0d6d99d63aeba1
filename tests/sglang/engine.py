"""A real engine in its own process: `python -m tests.sglang.engine MODEL RANKS SCENARIO...` prints lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np
from PIL import Image

from tests.vllm.inputs import IMAGE, chat, message, photograph

TOKENS = 4


def picture(number: int) -> str:
    return str(message(photograph(number, (448, 448)))[0]["content"][0]["image_url"]["url"])


SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.4,  # max_total_tokens bounds the pool, however much memory others take
    "max_total_tokens": 16384,
    "max_running_requests": 4,
    "skip_server_warmup": True,
    "log_level": "warning",
}
"""Of every engine here."""


def make(model: str, ranks: int) -> Any:
    import sglang

    return sglang.Engine(model_path=model, tp_size=ranks, **SETTINGS)


def blocks(wide: int, high: int) -> str:
    """Return a picture of the same blocks, however many of them are side by side."""
    noise = np.random.default_rng(0).integers(0, 256, (high * wide, 28, 28, 3), np.uint8)
    rows = noise.reshape(high, wide, 28, 28, 3).swapaxes(1, 2).reshape(high * 28, wide * 28, 3)
    return str(message(Image.fromarray(rows))[0]["content"][0]["image_url"]["url"])


async def ask(engine: Any, *asked: int | list[int], n: int = 1, rid: str | None = None) -> list[list[int]]:
    """Return the tokens of each sample of one request: of pictures by their numbers, or of blocks."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "n": n}
    images = [blocks(*one) if isinstance(one, list) else picture(one) for one in asked]
    prompt = chat(IMAGE * len(images), "what is this")
    answer = await engine.async_generate(prompt, sampling, image_data=images, rid=rid)
    return [one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])]


async def abort_some(engine: Any) -> None:
    asked = [asyncio.create_task(ask(engine, 20 + n, rid=f"abort-{n}")) for n in range(6)]
    await asyncio.sleep(0)
    for n in range(0, 6, 2):
        engine.tokenizer_manager.abort_request(rid=f"abort-{n}")
    await asyncio.gather(*asked, return_exceptions=True)


def figures() -> dict[str, Any] | None:
    """Return what can be seen from outside of this process's store, if it has one."""
    from shmstore.inspect.segments import find_segments

    found = [one.facts for one in find_segments() if one.facts and one.facts.writer_pid == os.getpid()]
    names = ("puts", "hits", "open_leases", "refusals", "objects")
    return {name: getattr(found[0], name) for name in names} if found else None


async def drawn(engine: Any, *requests: tuple[int, ...], n: int = 1) -> tuple[Any, Any]:
    """Ask one after the other; return the tokens, and what the store, if there is one, has done for them."""
    before = figures()
    said = [await ask(engine, *numbers, n=n) for numbers in requests]
    after = figures()
    return said, {name: after[name] - before[name] for name in ("puts", "hits")} if before and after else None


async def answers(engine: Any) -> dict[str, Any]:
    """Ask one after the other, then many at once."""
    await ask(engine, 0)  # the store is there with the first image
    said, done = {}, {}
    said["repeated"], done["repeated"] = await drawn(engine, (1,), (2,), (1,))
    said["three images"], done["three images"] = await drawn(engine, (3, 4, 3))
    said["samples"], done["samples"] = await drawn(engine, (5,), n=3)
    await abort_some(engine)
    said["at once"] = await asyncio.gather(*(ask(engine, number) for number in range(10, 18)))
    return {"tokens": said, "done": done, "store": figures()}


async def for_ever(engine: Any) -> None:
    async def one(number: int) -> None:
        while True:
            await ask(engine, number)
            print(json.dumps("answered"), flush=True)

    work: list[Awaitable[None]] = [one(number) for number in range(6)]
    await asyncio.gather(*work)


async def serve(engine: Any) -> None:
    """Answer the lines of the input as they come: prompts, asked at once, or a folder with new weights."""

    async def answer(asked: dict[str, Any]) -> None:
        said = await asyncio.gather(*(ask(engine, *prompt) for prompt in asked["ask"]))
        print(json.dumps({"id": asked["id"], "tokens": [samples[0] for samples in said]}), flush=True)

    running = set()
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        if "weights" in asked:
            from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

            update = UpdateWeightFromDiskReqInput(model_path=asked["weights"])
            done, message, _ = await engine.tokenizer_manager.update_weights_from_disk(update, None)
            assert done, message
        running.add(asyncio.create_task(answer(asked)))
    await asyncio.gather(*running)


SCENARIOS = {"answers": answers, "for ever": for_ever, "serve": serve}

if __name__ == "__main__":
    made = make(sys.argv[1], int(sys.argv[2]))
    print(json.dumps("started"), flush=True)
    for scenario in sys.argv[3:]:
        print(
            json.dumps(made.loop.run_until_complete(SCENARIOS[scenario](made))),
            flush=True,
        )
    made.shutdown()
