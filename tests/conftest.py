"""What all tests share: `--full`, the devices at hand, Ctrl-C, and one core for each worker of pytest-xdist."""

import os
import signal

# Before PyTorch comes, and for the processes that tests start: their tensors are small, and OpenMP's threads spin.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from flash_tutorial import emulator

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full product of cases, not only pairs (hours)")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: part of the full product of cases; runs with --full only")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job; what tests start inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        emulator.configure(threads=1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """What `-n auto` means: a worker for each core, up to 8. Where there is a GPU none: tests take turns on it."""
    return 0 if "cuda" in DEVICES else min(len(os.sched_getaffinity(0)), 8)


def pytest_collection_modifyitems(config, items):
    unwanted = [item for item in items if item.get_closest_marker("full")] if not config.getoption("--full") else []
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    """ "cpu", where the emulator runs the kernels, and "cuda" where there is a GPU."""
    return request.param
