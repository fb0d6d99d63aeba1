"""Values of shmstore that a scheduler reads answer as vLLM's own do."""

from __future__ import annotations

from random import Random

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange as Theirs

from shmstore.multimodal import PlaceholderRange


@pytest.mark.parametrize("seed", range(20))
def test_a_placeholder_range_has_the_members_and_answers_of_vllm(seed: int) -> None:
    rng = Random(seed)
    length = rng.randint(1, 12)
    mask = None if seed % 4 == 0 else torch.tensor(rng.choices([True, False], k=length))
    ours, theirs = PlaceholderRange(3, length, mask), Theirs(3, length, mask)
    assert {name for name in dir(Theirs) if not name.startswith("_")} <= set(dir(PlaceholderRange))
    assert theirs.embeds_cumsum == ours.embeds_cumsum
    assert theirs.get_num_embeds() == ours.get_num_embeds()
    assert theirs.extract_embeds_range() == ours.extract_embeds_range()
    for start in range(length + 1):
        for end in range(start, length + 1):
            assert theirs.get_embeds_indices_in_range(start, end) == ours.get_embeds_indices_in_range(start, end)
