"""How well the programs of a launch fill a GPU, by counts."""

import pytest

pytest.importorskip("triton")

from fused_rl.kernels import launch  # noqa: E402

COLUMNS = launch.SEGMENT * launch.K * launch.THREADS * 8  # of a segment of bf16 logits


MULTIPROCESSORS = {"H200": 132, "B200": 148}
# On a multiprocessor, by registers: four of 128 threads with 128 each.
PROGRAMS = 65536 // (128 * 128)


def filled(rows, whole, segments, resident):
    """Time of all segments at the device's full rate, over that of the launch: the last wave is not full.

    `whole` rows have a program each; those after them have one per segment. `resident` programs fit on the device.
    """
    ideal = rows * segments / resident
    waves = segments * launch.waves(whole, resident) + launch.waves(
        (rows - whole) * segments, resident
    )
    return ideal / max(ideal, waves)


@pytest.mark.parametrize("vocab", [32000, 50257, 128256, 151936, 262144])
@pytest.mark.parametrize("device", MULTIPROCESSORS)
def test_rows_fill_the_device_wherever_the_vocabulary_allows(vocab, device):
    """At least 83 % of the copy bandwidth's time, where there are three segments for each program that fits.

    From eight waves on no row is split, and the last wave, however empty, costs a ninth at most.
    """
    segments, resident = -(-vocab // COLUMNS), PROGRAMS * MULTIPROCESSORS[device]
    for rows in range(1, 16385):
        unsplit_rows = launch.choose_unsplit_rows(rows, segments, resident)
        assert 0 <= unsplit_rows <= rows
        share = filled(rows, unsplit_rows, segments, resident)
        if rows * segments >= 3 * resident:
            assert share >= 0.83, rows
        unsplit = filled(rows, rows, segments, resident)
        assert share >= unsplit - 1e-9, rows
        lanes = (rows - unsplit_rows) * segments * 2 * 3 * 4 * launch.THREADS
        # Written and read again; of the split rows' bytes.
        assert lanes <= 0.16 * (rows - unsplit_rows) * vocab * 2


def test_a_gradient_is_split_where_there_are_few_rows():
    assert [
        launch.programs_per_row(rows, 7, 528) for rows in (1, 600, 2000, 4000, 5000, 16384)
    ] == [
        7,
        7,
        2,
        1,
        1,
        1,
    ]
    assert launch.programs_per_row(1, 7, 0) == 1  # no device to fill
