"""Decode tokens/s of the engine's own loop beside transformers, both in one run on the same threads and weights.

    python benchmarks/decode.py [--model PATH] [--threads N] [--quick]
    python benchmarks/decode.py --threads 1 --clock cpu      # on a machine that is busy with other work

Greedy, float32, end-of-sequence ignored, random prompts of 128 tokens, no prefix reuse. For each concurrency the
rounds of the two sides alternate; figures are medians, the ratio is the median of the rounds' ratios.

- decode tok/s: tokens per second while all answers are in decode, from the last answer's first token to the first
  answer's last one;
- out tok/s: concurrency * out / time of the run, prompt included.

Sides: the engine (scheduler, paged KV, runner: ``engine.loop``), transformers' batched ``generate``, and transformers'
continuous batching (``generate_batch``) in a process of its own with a time limit; it does not say when a token came,
so its decode figure is the difference of a whole run and a run of one token.

Before any figure is printed, the engine's answers are judged by one pass of transformers over prompt and answer: each
token must be the pick of the reference, within 1e-3 of its best logit.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TARGETS = {1: 1.5, 8: 2.0, 32: 1.5}
FEWEST_STEPS = 8  # of pure decode that a figure needs
Prompts = Sequence[tuple[int, ...]]
Clock = Callable[[], float]  # seconds


class Run(NamedTuple):
    """Answers to prompts, and when each step brought how many tokens to which of them."""

    answers: list[list[int]]
    steps: list[tuple[float, list[int]]]  # time of a step's end, indices of the answers that grew by one token


Generate = Callable[[Prompts, int, Clock], Run]


def main() -> int:
    args = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported
    import torch

    torch.set_num_threads(args.threads)
    if args.side == "continuous":
        print(json.dumps(measure_continuous(args)))
        return 0
    model = resolve_model(args.model)
    print_machine(args)
    engine, described = make_engine(model)
    reference = make_reference(model)
    print(f"engine: {described}\nreference: transformers {reference.version}, generate, float32\n", flush=True)
    judged = judge(engine, reference, args)
    print(f"correctness: {judged}\n", flush=True)
    print(f"| concurrency | side | decode tok/s | out tok/s | ratio decode | target |\n|{'---|' * 6}", flush=True)
    for concurrency in args.concurrency:
        ours, theirs = [], []
        for round_ in range(args.rounds):
            prompts = random_prompts(args, concurrency, seed=round_)
            theirs.append(measure(reference.generate, prompts, args))
            ours.append(measure(engine, prompts, args))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
        target = f"{TARGETS[concurrency]}x" if concurrency in TARGETS else ""
        print_row(concurrency, "transformers generate", theirs, "1", "")
        print_row(concurrency, "kvferry engine", ours, f"{ratio:.2f}x", target)
        if args.continuous:
            print(f"| {concurrency} | transformers continuous batching | {continuous(args, model, concurrency)} |")
        sys.stdout.flush()
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what `kvferry model fetch` takes, or a path")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--out", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--continuous-limit", type=float, default=150.0, help="seconds; 0 leaves that side out")
    parser.add_argument("--quick", action="store_true", help="one round, 16 tokens, without continuous batching")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: time of this process's own work")
    parser.add_argument("--side", choices=("all", "continuous"), default="all", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.out, args.continuous_limit = 1, 16, 0.0
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu: needs --threads 1, with more it adds up the time of all threads, waiting included")
    args.continuous = args.continuous_limit > 0
    return args


def resolve_model(name: str) -> Path:
    from kvferry_runtime.model.fetch import default_root, fetch

    return fetch(name, default_root())


def print_machine(args: argparse.Namespace) -> None:
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu
        )
    print(f"machine: {cpu}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"command: {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(f"threads {args.threads}, prompt {args.prompt}, out {args.out}, rounds {args.rounds}, {args.clock} time")


def random_prompts(args: argparse.Namespace, count: int, seed: int) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(100, 20_000) for _ in range(args.prompt)) for _ in range(count)]


def clock_of(args: argparse.Namespace) -> Clock:
    return time.process_time if args.clock == "cpu" else time.perf_counter


def measure(generate: Generate, prompts: Prompts, args: argparse.Namespace) -> tuple[float, float]:
    """(decode tok/s, out tok/s) of one run."""
    clock = clock_of(args)
    started = clock()
    run = generate(prompts, args.out, clock)
    return decode_rate(run.steps, len(prompts)), len(prompts) * args.out / (clock() - started)


def decode_rate(steps: Sequence[tuple[float, list[int]]], count: int) -> float:
    """Tokens per second of the steps in which all ``count`` answers were in decode."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, (_, grown) in enumerate(steps):
        for index in grown:
            first.setdefault(index, number)
            last[index] = number
    if len(first) != count:
        raise RuntimeError(f"{len(first)} of {count} answers have tokens")
    begin, end = max(first.values()), min(last.values())
    if end - begin < FEWEST_STEPS:
        raise RuntimeError(f"all answers were in decode for {end - begin} steps only; ask for more with --out")
    return sum(len(grown) for _, grown in steps[begin + 1 : end + 1]) / (steps[end][0] - steps[begin][0])


def print_row(concurrency: int, side: str, runs: Sequence[tuple[float, float]], ratio: str, target: str) -> None:
    decode = statistics.median(run[0] for run in runs)
    out = statistics.median(run[1] for run in runs)
    print(f"| {concurrency} | {side} | {decode:.1f} | {out:.1f} | {ratio} | {target} |")


# ---- the engine ----


def make_engine(model: Path) -> tuple[Generate, str]:
    from kvferry_runtime.core.messages import LegKey, Submit, TokensOut
    from kvferry_runtime.engine.loop import build_engine
    from kvferry_wire.canonical import KeyExtras
    from kvferry_wire.leg import Sampling

    built = build_engine(str(model), dtype="float32", kv_bytes=640 * 2**20, prefix_caching=False)
    engine = built.engine
    runs = 0

    def generate(prompts: Prompts, out: int, clock: Clock) -> Run:
        nonlocal runs
        runs += 1
        steps: list[tuple[float, list[int]]] = []
        keys = {LegKey(f"run{runs}-{index}", 0): index for index in range(len(prompts))}
        answers: list[list[int]] = [[] for _ in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            submit = Submit(
                key=key,
                kind="generate",
                prompt_ids=prompt,
                emitted=((),),
                sampling=Sampling(seed=0, max_tokens=out, temperature=0.0, ignore_eos=True),
                extras=KeyExtras(),
                deadline_s=3600.0,
                eos_token_ids=(),
            )
            if engine.add(submit):
                raise RuntimeError(f"the engine refuses {submit}")
        while engine.has_work:
            grown = []
            for effect in engine.step():
                if isinstance(effect, TokensOut):
                    answers[keys[effect.key]].extend(effect.ids)
                    grown += [keys[effect.key]] * len(effect.ids)
            steps.append((clock(), grown))
        return Run(answers, steps)

    described = f"{built.config!r}; {'; '.join(built.loaded.reasons)}"
    return generate, described


# ---- transformers ----


class Transformers:
    """transformers' model of the same weights."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def config(self, out: int) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(do_sample=False, max_new_tokens=out, eos_token_id=None, pad_token_id=0)

    def generate(self, prompts: Prompts, out: int, clock: Clock) -> Run:
        import torch
        from transformers import StoppingCriteriaList

        ids = torch.tensor([list(prompt) for prompt in prompts])
        going_on = torch.zeros(len(prompts), dtype=torch.bool)
        steps: list[tuple[float, list[int]]] = []

        def tick(*_: Any, **__: Any) -> Any:  # asked by `generate` after each step whether to stop
            steps.append((clock(), list(range(len(prompts)))))
            return going_on

        with torch.inference_mode():
            whole = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self.config(out),
                stopping_criteria=StoppingCriteriaList([tick]),
            )
        return Run(whole[:, ids.shape[1] :].tolist(), steps)

    def generate_continuous(self, prompts: Prompts, out: int) -> list[list[int]]:
        from transformers.generation import ContinuousBatchingConfig

        done = self.model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=self.config(out),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=400, max_batch_tokens=512),
        )
        return [list(answer.generated_tokens) for answer in done.values()]


def make_reference(model: Path) -> Transformers:
    from kvferry_runtime.model.folder import open_folder
    from tests.support.reference import converted_folder

    return Transformers(converted_folder(model) if open_folder(model).gguf is not None else model)


def judge(engine: Generate, reference: Transformers, args: argparse.Namespace) -> str:
    """Judge the engine's answers by the reference's logits; raises when a token is not its pick."""
    import torch

    prompts = random_prompts(args, max(args.concurrency), seed=99)
    answers = engine(prompts, args.out, time.perf_counter).answers
    close = 0
    for prompt, answer in list(zip(prompts, answers, strict=True))[:8]:
        with torch.inference_mode():
            logits = reference.model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        margins = logits.max(dim=-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
        if len(answer) != args.out or float(margins.max()) > 1e-3:
            raise RuntimeError(f"the engine's answer is wrong by {float(margins.max()):.4f} at {int(margins.argmax())}")
        close += int((margins > 0).sum())
    return f"{8 * args.out} tokens of a batch of {len(prompts)} are transformers' picks ({close} within 1e-3)"


def measure_continuous(args: argparse.Namespace) -> dict[str, float]:
    reference = make_reference(Path(args.model))
    prompts = random_prompts(args, args.concurrency[0], seed=0)
    clock = clock_of(args)
    started = clock()
    reference.generate_continuous(prompts, 1)
    first = clock() - started
    started = clock()
    reference.generate_continuous(prompts, args.out)
    whole = clock() - started
    return {
        "decode": len(prompts) * (args.out - 1) / (whole - first),
        "out": len(prompts) * args.out / whole,
    }


def continuous(args: argparse.Namespace, model: Path, concurrency: int) -> str:
    """Run the continuous side in a process of its own: figures as table cells, or why there are none."""
    command = [
        sys.executable,
        __file__,
        "--side",
        "continuous",
        "--model",
        str(model),
        "--concurrency",
        str(concurrency),
    ]
    command += [
        "--threads",
        str(args.threads),
        "--clock",
        args.clock,
        "--prompt",
        str(args.prompt),
        "--out",
        str(args.out),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.continuous_limit, check=False)
    except subprocess.TimeoutExpired:
        return f"did not finish in {args.continuous_limit:.0f} s | | |"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"failed: {reason[:150]} | | |"
    figures = json.loads(lines[-1])
    return f"{figures['decode']:.1f} | {figures['out']:.1f} | |"


if __name__ == "__main__":
    raise SystemExit(main())
