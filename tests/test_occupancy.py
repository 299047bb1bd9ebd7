"""Programs of a launch over the GPU, by the model of `bench/compiled/occupancy.py`."""

import pytest

pytest.importorskip("triton")

from bench.compiled import occupancy  # noqa: E402
from fused_rl.kernels import launch  # noqa: E402

COLUMNS = launch.SEGMENT * launch.K * launch.THREADS * 8  # of a segment of bf16 logits


@pytest.mark.parametrize("vocab", [32000, 50257, 128256, 151936, 262144])
@pytest.mark.parametrize("device", [occupancy.H200, occupancy.B200])
def test_rows_fill_the_device_wherever_the_vocabulary_allows(vocab, device):
    """At least 83 % of the copy bandwidth's time, where there are three segments for each program that fits.

    From eight waves on no row is split, and the last wave, however empty, costs a ninth at most.
    """
    segments, resident = -(-vocab // COLUMNS), device.programs(128) * device.multiprocessors
    for rows in range(1, 16385):
        whole = launch.whole_rows(rows, segments, resident)
        assert 0 <= whole <= rows
        filled = occupancy.filled(rows, whole, segments, resident)
        if rows * segments >= 3 * resident:
            assert filled >= 0.83, rows
        unsplit = occupancy.filled(rows, rows, segments, resident)
        assert filled >= unsplit - 1e-9, rows
        lanes = (rows - whole) * segments * 2 * 3 * 4 * launch.THREADS
        assert lanes <= 0.16 * (rows - whole) * vocab * 2  # written and read again; of the split rows' bytes


def test_a_gradient_is_split_where_there_are_few_rows():
    assert [launch.parts_of_row(rows, 7, 528) for rows in (1, 600, 2000, 4000, 5000, 16384)] == [7, 7, 2, 1, 1, 1]
    assert launch.parts_of_row(1, 7, 0) == 1  # no device to fill


def test_the_model_of_a_copy_knows_what_bounds_it():
    """A roof each: bytes in flight, special functions, memory; more of the bounding one is what helps."""
    loop = {"instructions": 9.36, "alu": 3.6, "special": 1.125, "bytes": 128, "elements": 64}
    few, many = (occupancy.share_of_copy(loop, 20, programs, occupancy.H200) for programs in (1, 4))
    assert few < 0.55 and many > 0.9
    ahead = occupancy.share_of_copy(loop, 500, 1, occupancy.H200)
    assert ahead > few  # loads that have 500 instructions of time are waited for less
    assert occupancy.share_of_copy(loop | {"special": 4.5}, 20, 4, occupancy.H200) < 0.5
