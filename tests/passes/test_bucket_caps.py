"""Sizes of buckets given one by one: `DistributedDataParallel(bucket_cap_mb_list=…)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxddp.passes.bucketing import plan_buckets
from fxddp.passes.plan import BucketPlan, GradSpec, check_plan


def grads(*sizes: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[GradSpec]:
    """Gradients of these numbers of bytes, ready one after the other, their dtypes taking turns."""
    specs = []
    for i, size in enumerate(sizes):
        dtype = dtypes[i % len(dtypes)]
        shape = (size // dtype.itemsize,)
        where: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu"), "tangents": frozenset()}
        specs.append(GradSpec(output=i, input=i, ready=i, shape=shape, stride=(1,), **where))
    return specs


def members(plan: BucketPlan) -> list[list[int]]:
    return [[grad.output for grad in bucket.grads] for bucket in plan.buckets]


def planned(specs: list[GradSpec], *caps: int) -> BucketPlan:
    plan = plan_buckets(specs, cap=max(caps), first_cap=max(caps), caps=caps)
    check_plan(plan, specs)
    return plan


def test_each_bucket_has_its_own_limit():
    plan = planned(grads(*[8] * 12), 8, 24, 16)
    assert members(plan) == [[0], [1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11]], "the last one serves all others"


def test_kinds_count_their_own_buckets():
    plan = planned(grads(*[8] * 8, dtypes=(torch.float32, torch.float64)), 8, 16)
    assert members(plan) == [[0], [1], [2, 4], [3, 5], [6], [7]]


def test_a_gradient_larger_than_its_limit_is_alone():
    assert members(planned(grads(8, 64, 8, 8), 16, 16, 16)) == [[0], [1], [2, 3]]


@pytest.mark.parametrize("caps", [(8, 24), (24, 8), (24,)])
def test_another_plan_does_not_pass(caps: tuple[int, ...]):
    specs = grads(*[8] * 9)
    plan = planned(specs, *caps)
    other = BucketPlan(plan.buckets, cap=plan.cap, first_cap=plan.first_cap, caps=(16, 16))
    with pytest.raises(AssertionError, match="cap is 16"):
        check_plan(other, specs)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_sizes_are_bytes(wrong: int):
    with pytest.raises(ValueError, match="caps must be a positive whole number of bytes"):
        plan_buckets(grads(8), cap=8, first_cap=8, caps=(8, wrong))
