"""``python -m fp4_inductor bench``: MoE layers on our backends, beside the peers and the floor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ..device import DeviceInfo
from ..errors import InvalidOptionError, UnknownNameError
from ..formats import FORMATS, get_format
from . import plot, table
from .floor import H200, Rates
from .machine import Nvml, environment
from .measure import default_backend, measure, our_contenders, peer_contenders
from .peers import CPU_PEERS, PEERS, Peer
from .results import Results, read_json, write_csv, write_json
from .shapes import SHAPES, parse_shape

_DESCRIPTION = """\
Microseconds of one MoE layer call, from router logits to output: top-k, softmax, sort, both GEMMs, activation and
weighted combine. On a GPU they are medians of CUDA-graph replays over several inputs, so that weights come from
memory; everybody gets the same inputs in one process. The floor is the larger of the packed bytes of the experts
that are expected to be routed over the memory bandwidth, and the operations over the matrix rate; on a CPU whose
rates are not given, the time of reading the packed bytes of the routed experts, measured in the same run.
"""
_EPILOG = """\
Peers are found where they are installed: triton_kernels (also as vLLM carries it), marlin (in vLLM; or the file of
its _moe_C library, named by the environment variable FP4_INDUCTOR_MARLIN_LIBRARY), flashinfer (sm_90, with its
fused_moe_90 module built before), and grouped_mm on bfloat16 weights; on a CPU, ggml as llama-cpp-python ships it
(or in the folder of libggml.so that FP4_INDUCTOR_GGML names), with weights as they are and repacked. "peer/it" is the
time of the fastest of them on the same weight format, or on bfloat16, over ours.
"""
_TOKENS = "1,2,4,8,16,64,256,1024,4096,16384"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe this command's arguments; its ``run`` gets them."""
    parser = commands.add_parser(
        "bench",
        help="time MoE layers beside peers and the floor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(SHAPES)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {names}; or sizes as ExkxHxI (default: all)")
    parser.add_argument("--tokens", default=_TOKENS, help=f"token counts (default: {_TOKENS})")
    parser.add_argument("--backends", help="kernel backends (default: the one a compiled model gets on this device)")
    parser.add_argument("--formats", default="mxfp4", help=f"weight formats, of {', '.join(FORMATS)} (default: mxfp4)")
    peers = ", ".join(peer.name for peer in (*PEERS, *CPU_PEERS))
    parser.add_argument("--peers", nargs="?", const="all", metavar="NAMES", help=f"all, or some of {peers}")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:N, or cpu, timed by the wall clock (default: cuda)"
    )
    parser.add_argument("--bandwidth", type=float, help=f"TB/s (default: an H200's {H200.bandwidth})")
    parser.add_argument("--tflops", type=float, help=f"bfloat16 rate (default: an H200's {H200.tflops})")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows and ratios here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time over tokens here, as PNG (needs matplotlib)"
    )
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing: show what --json once wrote")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure or read, print, and write the files that were asked for, even if the measurement is cut short."""
    _check_files(args)
    if args.from_json:
        results = read_json(args.from_json)
        print("\n".join([table.header(results), *(table.line(results, row) for row in results.rows)]))
        _finish(args, results)
        return
    device = _device(args.device)
    info = DeviceInfo.current(device)
    shapes = [parse_shape(text) for text in args.shapes.split(",")]
    tokens = _numbers(args.tokens)
    formats = [get_format(name) for name in args.formats.split(",")]
    names = args.backends.split(",") if args.backends else [default_backend(shapes[0], formats[0], info)]
    contenders = our_contenders(names, formats, shapes, device)
    peers, notes = peer_contenders(_peers(args.peers, device), formats, info)
    contenders += peers
    rates = _rates(args, device)
    nvml = Nvml.of(device)
    timed_by = "wall clock" if device.type == "cpu" else "CUDA-graph replay"
    about = {**environment(device, nvml), "medians by": timed_by, **_floor_by(rates)}
    results = Results(about, tuple(contender.column for contender in contenders), notes=notes)
    try:
        for index, rows in enumerate(measure(results, contenders, shapes, tokens, rates, device, nvml)):
            if index == 0:
                print(table.header(results))
            print("\n".join(table.line(results, row) for row in rows), flush=True)
    finally:
        _finish(args, results)


def _finish(args: argparse.Namespace, results: Results) -> None:
    print(f"\n{table.summary(results)}")
    if args.csv:
        write_csv(results, args.csv)
    if args.json:
        write_json(results, args.json)
    if args.plot:
        plot.draw(results, args.plot)


def _check_files(args: argparse.Namespace) -> None:
    """Refuse before minutes of measuring what could not be written after them."""
    if args.plot:
        plot.require_matplotlib()
    for path in (args.csv, args.json, args.plot):
        if path and not path.parent.is_dir():
            raise InvalidOptionError("choosing where to write", needed="a folder that exists", got=str(path.parent))


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UnknownNameError("reading --device", text, ["cuda", "cuda:1", "cpu"]) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidOptionError("reading --device", needed="a CUDA device", got="none", now="try --device cpu")
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise InvalidOptionError("reading --device", needed="cuda or cpu", got=text)
    return device


def _numbers(text: str) -> list[int]:
    counts = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if min(counts) < 1:
        raise InvalidOptionError("reading --tokens", needed="positive numbers with commas between", got=text)
    return sorted(set(counts))


def _peers(text: str | None, device: torch.device) -> Sequence[Peer]:
    if text is None:
        return ()
    peers = PEERS if device.type == "cuda" else CPU_PEERS
    if text == "all":
        return peers
    by_name = {peer.name: peer for peer in peers}
    for name in text.split(","):
        if name not in by_name:
            raise UnknownNameError("reading --peers", name, by_name)
    return [by_name[name] for name in text.split(",")]


def _rates(args: argparse.Namespace, device: torch.device) -> Rates:
    known = H200 if device.type == "cuda" else Rates()
    return Rates(
        bandwidth=known.bandwidth if args.bandwidth is None else args.bandwidth,
        tflops=known.tflops if args.tflops is None else args.tflops,
    )


def _floor_by(rates: Rates) -> dict[str, str]:
    limits = [f"{rate:g} {unit}" for rate, unit in ((rates.bandwidth, "TB/s"), (rates.tflops, "TFLOP/s")) if rate]
    return {"floor by": " and ".join(limits) or "reading the routed bytes"}
