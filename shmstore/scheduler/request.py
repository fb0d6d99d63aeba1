"""What the managers need of a request, and a class that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex, overload

from shmstore.bindings.hashlist import BlockHashes
from shmstore.errors import check_flags, shown
from shmstore.scheduler.checks import INT64_LIMIT, check_in_order, plain_token_ids


class RequestLike(Protocol):
    """What the managers read of a request: any object with these attributes will do.

    `request_id` must be unique among the requests that hold anything. `block_hashes` may be any sequence of bytes. A
    `BlockHashes` is read in place; anything else is copied for each call that needs it. An engine that schedules a step
    before the last one is done also has `num_in_flight_tokens`: how many of `num_computed_tokens` are not computed yet.
    """

    request_id: str
    num_computed_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens; a slice of it is a list."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of the full blocks."""


class TokenView(Sequence[int]):
    """A read-only view of a request's tokens that follows them as they grow; a slice of it is a list."""

    __slots__ = ("_tokens",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __eq__(self, other: object) -> bool:
        return self._tokens == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"TokenView({self._tokens!r})"


def _ids_of(given: Any) -> list[int]:
    """Return token ids as Python integers; a 0-d array counts as one integer, other arrays as sequences."""
    tolist = getattr(given, "tolist", None)
    values = given if tolist is None else tolist()
    one = not isinstance(values, list) if tolist is not None else hasattr(type(given), "__index__")
    return plain_token_ids("token_ids", [values] if one else values)


class Request:
    """One request as the managers see it: its tokens, how many are computed, and its block hashes.

    * `prompt_token_ids` are integers of any type, or an array or tensor. They are kept as Python integers. TypeError if
      one is not an integer, ValueError if one is beyond 64 bits; both name its position.
    * `prompt_embeds`, an array or tensor with one row for each token, may replace them; all token ids are then 0.
    * `block_hasher` is called with the request whenever it has grown. None leaves `block_hashes` empty, which is enough
      with caching off.
    * `mm_features` are items with `identifier` and `mm_position`, in order of offset. ValueError names the first item
      that is out of order.
    * `lora_name`, `lora_id` and `lora_path` describe the LoRA adapter. Name and path are in the block hashes, so that a
      name that means another adapter now finds nothing of the earlier one; events have name and number.

    ValueError if there are no tokens, or for a name or a salt that UTF-8 cannot encode and `block_hasher` needs.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        *,
        block_hasher: Callable[[Any], Sequence[bytes]] | None = None,
        mm_features: Sequence[Any] = (),
        cache_salt: str | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        lora_path: str | None = None,
        skip_reading_prefix_cache: bool = False,
        prompt_embeds: Any = None,
    ) -> None:
        if prompt_token_ids is None and prompt_embeds is None:
            raise ValueError("a request needs prompt_token_ids or prompt_embeds")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, not {shown(request_id)}")
        if skip_reading_prefix_cache is not False:
            check_flags(skip_reading_prefix_cache=skip_reading_prefix_cache)
        check_in_order(mm_features)
        self.request_id = request_id
        self.prompt_embeds = prompt_embeds
        if prompt_token_ids is None:
            self._token_ids = [0] * len(prompt_embeds)
        else:
            self._token_ids = plain_token_ids("prompt_token_ids", prompt_token_ids)
        if not self._token_ids:
            what = "prompt_embeds" if prompt_token_ids is None else "prompt_token_ids"
            raise ValueError(f"a request needs at least one token, and {what} is empty")
        self.num_prompt_tokens = len(self._token_ids)
        self.prompt_token_ids = prompt_token_ids
        self.mm_features = list(mm_features)
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.lora_id = lora_id
        self.lora_path = lora_path
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.all_token_ids = TokenView(self._token_ids)
        self.block_hashes = BlockHashes()
        self._block_hasher = block_hasher
        if block_hasher is not None:
            self.block_hashes.extend(block_hasher(self))

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self._token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that were appended to the prompt."""
        return len(self._token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens that were appended to the prompt."""
        return self._token_ids[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_ids: SupportsIndex | Iterable[SupportsIndex]) -> None:
        """Append generated tokens and the hashes of the blocks that they fill; if either fails, append neither.

        Take one integer of any type, or a sequence, array or tensor of them. TypeError if one is not an integer,
        ValueError if one is beyond 64 bits; both name its position.
        """
        tokens, known, hashed = self._token_ids, len(self._token_ids), None
        try:
            if type(token_ids) is int and -INT64_LIMIT <= token_ids < INT64_LIMIT:
                tokens.append(token_ids)
            else:
                tokens.extend(_ids_of(token_ids))
            if self._block_hasher is not None:
                new = self._block_hasher(self)
                if new:
                    hashed = len(self.block_hashes)
                    self.block_hashes.extend(new if isinstance(new, BlockHashes) else list(new))
        except BaseException:
            # Hashes must not outlive their tokens: keep both if the interrupt came after the hashes were added.
            if hashed is None or len(self.block_hashes) == hashed:
                del tokens[known:]
            raise

    def get_num_encoder_tokens(self, i: int) -> int:
        """Return the length of item i's placeholder range."""
        length: int = self.mm_features[i].mm_position.length
        return length

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.num_tokens} tokens, {self.num_computed_tokens} computed)"
