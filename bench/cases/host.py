"""What a call costs the host: inputs so small that a GPU waits for it; the rows' `host_ms` say how long."""

from bench.cases.case import Spec
from bench.cases.kl import KLCase
from bench.cases.linear import LinearCase
from bench.cases.logprobs import LogprobsCase


class HostLogprobs(LogprobsCase):
    op = "host, token_logprobs"
    cpu = gpu = [Spec((64, 1024), "bf16")]


class HostKL(KLCase):
    op = "host, token_kl"
    cpu = gpu = [Spec((64, 1024), "bf16")]


class HostHead(LinearCase):
    op = "host, linear"
    cpu = gpu = [Spec((256, 64, 1024), "bf16")]
