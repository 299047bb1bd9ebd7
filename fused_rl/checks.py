"""What the public functions check of their arguments; one wording each."""


def check_choice(name, value, valid):
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}; got {value!r}")
