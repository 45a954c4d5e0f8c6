"""``kvferry bench``: measurements of a manifest's service on this machine."""

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path

from kvferry_cli.arguments import HelpFormatter, seconds
from kvferry_cli.bench import plot, report
from kvferry_cli.bench.comparison import Asked, measure
from kvferry_cli.bench.figures import compare
from kvferry_cli.bench.load import WORDS, LoadSpec
from kvferry_cli.bench.manifests import faults_of, notes_of
from kvferry_cli.bench.verdict import facts_of, judge
from kvferry_cli.commands.up import planned, read_manifest
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local.preflight import check_model, refuse
from kvferry_cli.models import resolve_model

DESCRIPTION = "Measurements of a manifest's service on this machine."

PD_DESCRIPTION = """\
Does it pay? Measure one load against a manifest's service twice in one run, on the same cores: as the manifest says,
with prefill pods and decode pods, and aggregated: as many pods, each of which does whole requests, behind the same
router. Running streams write all the time while long prompts arrive one at a time.

Both services run on 127.0.0.1, beside each other, with ports and keys of their own; they take turns, and the first
round of each does not count. Every pod gets cores of its own where there are enough. The load is the same for both
sides and for every run with the same seed. Answers are compared between the sides; where they differ, and for a few
that do not, the model itself judges each token: one wrong answer, and no figure is shown. Ctrl-C stops everything.

The table shows medians over the rounds with the least and the largest, ratios (disaggregated over aggregated) between
rounds that ran one after the other, and a plain verdict: where disaggregation does not pay on this machine, and why.
"""
MAX_TOKENS = 2**20


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench", help="measure a manifest's service", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True, dest="benchmark")
    pd = benchmarks.add_parser(
        "pd",
        help="prefill and decode apart, beside the same pods that do both",
        description=PD_DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    pd.add_argument("file", type=Path, metavar="MANIFEST", help="with at least one prefill and one decode pod")
    _add_load(pd)
    _add_outputs(pd)
    _add_conduct(pd)
    pd.set_defaults(run=run_pd)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    for flag, default, most, words in (
        ("--streams", 8, 4096, "answers that are written all the time"),
        ("--stream-prompt-tokens", 32, MAX_TOKENS, "tokens of a stream's prompt"),
        ("--stream-tokens", 256, MAX_TOKENS, "tokens of a stream's answer; the stream then asks again"),
        ("--prompts", 4, 10_000, "long prompts in each round, one at a time"),
        ("--prompt-tokens", 1500, MAX_TOKENS, "tokens of a long prompt"),
        ("--answer-tokens", 8, MAX_TOKENS, "tokens of a long prompt's answer"),
        ("--rounds", 3, 1000, "measured rounds of each side"),
    ):
        least = 2 if flag in ("--stream-tokens", "--answer-tokens") else 1
        load.add_argument(flag, type=_number(least, most), default=default, metavar="N", help=words)
    load.add_argument(
        "--pause",
        type=_pause,
        default=0.1,
        metavar="SECONDS",
        help="longest pause between an answer and the next prompt",
    )
    load.add_argument(
        "--seed", type=_number(0, 2**63 - 1), default=0, metavar="N", help="of prompts and pauses (default: 0)"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    outputs = parser.add_argument_group("output, beside the table")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="everything, with each sample, as one JSON object")
    outputs.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png); needs kvferry[bench]")


def _add_conduct(parser: argparse.ArgumentParser) -> None:
    conduct = parser.add_argument_group("conduct")
    conduct.add_argument("--no-pin", action="store_true", help="let the kernel place the pods on cores")
    conduct.add_argument(
        "--apart",
        action="store_true",
        help="run each side only while it is measured: half the memory, and a start for each round",
    )
    conduct.add_argument(
        "--start-limit", type=seconds, default=600.0, metavar="SECONDS", help="until a side must be ready"
    )
    conduct.add_argument("--round-limit", type=seconds, default=600.0, metavar="SECONDS", help="for one round")
    conduct.add_argument(
        "--judged", type=_number(0, 10_000), default=8, metavar="N", help="most answers that the model itself judges"
    )


def run_pd(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Whatever the verdict, a finished measurement is a success."""
    load = _load_of(args)
    _check_outputs(args)
    service = read_manifest(args.file)
    refuse(args.file, faults_of(service))
    refuse(args.file, _length_faults(service.spec.engine.max_model_len, load))
    side_plan = planned(args.file)
    model = resolve_model(
        side_plan.source,
        args.file.absolute().parent,
        progress=True,
        s3_endpoint=side_plan.s3_endpoint,
        s3_region=side_plan.s3_region,
    )
    check_model(model)
    asked = Asked(
        manifest=args.file.absolute(),
        service=service,
        model=model,
        words=_words_of(model, load),
        load=load,
        cores=usable(),
        pinned=not args.no_pin,
        apart=args.apart,
        start_s=args.start_limit,
        round_s=args.round_limit,
        judged=args.judged,
    )
    measured = measure(asked, lambda line: print(line, file=sys.stderr, flush=True))
    figures, facts = compare(measured.rounds), facts_of(measured.rounds, cores=len(asked.cores))
    made = report.Report(
        machine=_machine(asked.cores),
        manifest=str(args.file),
        model=service.spec.model.name,
        load=load,
        measured=measured,
        figures=figures,
        facts=facts,
        verdict=judge(figures, facts),
        notes=tuple(notes_of(service)),
    )
    print(report.as_text(made), flush=True)
    _write_outputs(args, made)
    return ExitCode.OK


def _write_outputs(args: argparse.Namespace, made: report.Report) -> None:
    if args.json is not None:
        args.json.write_bytes(report.as_json(made))
    if args.plot is not None:
        plot.write_plot(made, args.plot)


# ---- what is asked for ---------------------------------------------------------------------------------------------


def _load_of(args: argparse.Namespace) -> LoadSpec:
    return LoadSpec(
        streams=args.streams,
        stream_prompt_tokens=args.stream_prompt_tokens,
        stream_tokens=args.stream_tokens,
        prompts=args.prompts,
        prompt_tokens=args.prompt_tokens,
        answer_tokens=args.answer_tokens,
        pause_s=args.pause,
        rounds=args.rounds,
        seed=args.seed,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises ``UserError`` for files that could not be written when all is measured."""
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is None:
            continue
        if file.is_dir():
            raise UserError(f"{flag}: {file} is a folder; accepts a file", ExitCode.USAGE)
        if not file.absolute().parent.is_dir():
            raise UserError(f"{flag}: there is no folder {file.absolute().parent}", ExitCode.USAGE)
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UserError(f"{flag}: {file} cannot be written", ExitCode.USAGE)
    if args.plot is not None:
        if args.plot.suffix.lower() != ".png":
            raise UserError(f"--plot: got {str(args.plot)!r}; accepts a name that ends in .png", ExitCode.USAGE)
        if reason := plot.why_not():
            raise UserError(f"--plot: {reason}", ExitCode.USAGE)


def _length_faults(most: int | None, load: LoadSpec) -> list[str]:
    """What the manifest says of lengths is told at once; what the model says, when its pods have started."""
    if most is None:
        return []
    faults = []
    for flags, tokens in (
        ("--stream-prompt-tokens and --stream-tokens", load.stream_prompt_tokens + load.stream_tokens),
        ("--prompt-tokens and --answer-tokens", load.prompt_tokens + load.answer_tokens),
    ):
        if tokens > most:
            faults.append(f"{flags}: {tokens} together; spec.engine.maxModelLen is {most}")
    return faults


def _words_of(model: str, load: LoadSpec) -> tuple[tuple[int, ...], ...]:
    """The token ids of the prompts' words. Raises ``UserError``."""
    from kvferry_runtime.model.folder import open_folder
    from kvferry_runtime.model.text import load_text_bundle
    from kvferry_text.tokenizer import TextTokenizer

    folder = open_folder(model)
    if load.longest > folder.config.max_model_len:
        raise UserError(
            f"the load's longest sequence has {load.longest} tokens; the model takes {folder.config.max_model_len}",
            ExitCode.USAGE,
        )
    tokenizer = TextTokenizer(load_text_bundle(folder))
    return tuple(tuple(tokenizer.encode(f" {word}", special=False, add_bos=False)) for word in WORDS)


def usable() -> tuple[int, ...]:
    """The cores that this process may run on."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return tuple(range(os.cpu_count() or 1))


def _machine(cores: tuple[int, ...]) -> report.Machine:
    return report.Machine(
        cpu=_cpu_name(),
        cores=cores,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        kvferry=importlib.metadata.version("kvferry"),
        command=f"kvferry {shlex.join(sys.argv[1:])}",
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _number(least: int, most: int) -> "argparse._ActionType":
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}; accepts an integer from {least} to {most}")
        return number

    return parse


def _pause(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts seconds from 0 to 3600")
    return number
