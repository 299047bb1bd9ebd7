"""Output folders that a command must refuse."""

from tests.trainers.bad_inputs.cases import words

PLACES = [
    *words("sft", "--output_dir /proc/run", "could not be written to /proc/run"),
    *words("sft", "--output_dir .", "is the current folder, or holds it"),
]
