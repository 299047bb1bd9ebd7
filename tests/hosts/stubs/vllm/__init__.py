"""In place of vllm, which needs a GPU to run: the names that OpenRLHF's trainers import of it."""


class SamplingParams:
    pass
