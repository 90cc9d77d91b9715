"""A lost CUDA context is distinguished from other errors, with the fix."""

from __future__ import annotations

import pytest

from axon_nb.cluster.failures import RankError, cell_error, context_hint, hint_for, lost_contexts

ASSERT = (
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.00 GiB"


def _raised(rank: int, text: str) -> RankError:
    return RankError(rank, "raised", "AcceleratorError", text, ("line 1",))


@pytest.mark.parametrize(
    "text", [ASSERT, "CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure"]
)
def test_lost_cuda_context_is_reported_with_ranks_to_repair(text: str) -> None:
    errors = {2: _raised(2, text), 0: RankError(0, "aborted", "AbortedError", "waited in barrier")}
    assert lost_contexts(errors) == [2]
    error = cell_error(errors, first=[2, 0], hint=context_hint(errors))
    assert "Rank 2 lost its CUDA context" in "\n".join(error._render_traceback_())
    assert "`%distributed repair --ranks 2`" in "\n".join(error._render_traceback_())
    both = {1: _raised(1, text), 2: _raised(2, text)}
    assert context_hint(both).startswith("Ranks 1-2 lost their CUDA context")


@pytest.mark.parametrize(
    "error",
    [
        _raised(0, FULL),
        _raised(0, "device-side assert triggered"),  # no word of CUDA: any code may say so
        RankError(0, "aborted", "AbortedError", ASSERT),
        RankError(0, "died", "", "was killed by SIGKILL"),
    ],
)
def test_other_errors_are_not_lost_contexts(error: RankError) -> None:
    assert lost_contexts({0: error}) == []
    assert context_hint({0: error}) == ""


NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:90, unhandled system error\nLast error:\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            NCCL + "Error while creating shared memory segment /dev/shm/nccl-AbCd (size 9637888)",
            "Shared memory is full",
        ),
        (NCCL + "Cuda failure 217 'peer access is not supported between these two devices'", "NCCL_P2P_DISABLE=1"),
        (NCCL + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "`--backend gloo`"),
        (NCCL + "socketStartConnect: Connect to 10.0.0.2<38117> failed", "`NCCL_DEBUG=WARN`"),
    ],
)
def test_nccl_errors_have_a_fix(text: str, hint: str) -> None:
    found = hint_for([RankError(0, "raised", "DistBackendError", text, ("line 1",))])
    assert hint in found
    assert found.count("NCCL_DEBUG") == ("NCCL_DEBUG" in hint)
