"""A real engine in its own process: `python -m tests.sglang.engine MODEL RANKS SCENARIO...` prints lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any

from tests.vllm.inputs import IMAGE, chat, message, photograph

TOKENS = 4


def picture(number: int) -> str:
    return str(message(photograph(number, (448, 448)))[0]["content"][0]["image_url"]["url"])


def make(model: str, ranks: int) -> Any:
    import sglang

    return sglang.Engine(
        model_path=model,
        device="cpu",
        tp_size=ranks,
        attention_backend="torch_native",
        mm_attention_backend="sdpa",
        grammar_backend="none",
        cuda_graph_backend_prefill="disabled",
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        mem_fraction_static=0.05,
        max_total_tokens=16384,
        max_running_requests=4,
        skip_server_warmup=True,
        log_level="warning",
    )


async def ask(engine: Any, *numbers: int, n: int = 1, rid: str | None = None) -> list[list[int]]:
    """Return the tokens of each sample of one request."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "n": n}
    prompt, images = chat(IMAGE * len(numbers), "what is this"), [picture(number) for number in numbers]
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


if __name__ == "__main__":
    made = make(sys.argv[1], int(sys.argv[2]))
    print(json.dumps("started"), flush=True)
    for scenario in sys.argv[3:]:
        print(
            json.dumps(made.loop.run_until_complete({"answers": answers, "for ever": for_ever}[scenario](made))),
            flush=True,
        )
    made.shutdown()
