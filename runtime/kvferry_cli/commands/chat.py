"""``kvferry chat``: talk to a running endpoint, streaming."""

import argparse
import importlib
import os
import sys
from urllib.parse import urlsplit

from kvferry_cli.arguments import RUNNING, HelpFormatter, add_state_dir, finite, seconds
from kvferry_cli.chat_client import ChatClient, ChatError
from kvferry_cli.commands.ps import current
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local import registry

DESCRIPTION = """\
Talk to a running service. Without --message it asks for one line after another and keeps the conversation; Ctrl-C
stops an answer, Ctrl-D ends. With --message it prints one answer and exits.
"""
KEY_VARIABLE = "KVFERRY_API_KEY"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat", help="talk to a running endpoint", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    parser.add_argument("--message", "-m", metavar="TEXT", help="ask this one thing; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument(
        "--url", metavar="URL", help="the endpoint, such as http://127.0.0.1:8000 (default: that of the state folder)"
    )
    add_state_dir(parser, default=RUNNING)
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the endpoint lists)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what fits)")
    parser.add_argument("--temperature", type=finite, metavar="T", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=finite, metavar="P", help="nucleus sampling (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes answers repeatable")
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS", help="longest silence of the endpoint"
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="show path and token counts after each answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code. The API key, if needed, is in ``KVFERRY_API_KEY``."""
    client = ChatClient(_endpoint(args), os.environ.get(KEY_VARIABLE), args.timeout)
    try:
        model = args.model or client.first_model()
        conversation = _Conversation(client, model, args)
        if args.message is not None:
            text = _standard_input() if args.message == "-" else args.message
            conversation.ask(text)
            return ExitCode.OK
        return _dialogue(conversation, model)
    except ChatError as error:
        raise UserError(str(error)) from None


def _endpoint(args: argparse.Namespace) -> str:
    if args.url is None:
        return current(registry.find(args.state_dir)).endpoint
    url = args.url if "://" in args.url else f"http://{args.url}"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine = False
    if not fine:
        raise UserError(f"--url: got {args.url!r}; accepts http://HOST:PORT", ExitCode.USAGE)
    return url.rstrip("/").removesuffix("/v1")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ChatError("standard input is not UTF-8") from None


class _Conversation:
    """The messages so far, and how the next one is asked."""

    def __init__(self, client: ChatClient, model: str, args: argparse.Namespace) -> None:
        self._client = client
        self._verbose = args.verbose
        self._messages: list[dict[str, str]] = []
        if args.system:
            self._messages.append({"role": "system", "content": args.system})
        chosen = {
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "seed": args.seed,
        }
        self._options = {"model": model} | {name: value for name, value in chosen.items() if value is not None}

    def ask(self, text: str) -> None:
        """Send one message, print the answer as it comes. A failed or interrupted exchange is not remembered."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        try:
            for piece in self._client.stream({**self._options, "messages": messages}):
                answer += piece
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if self._verbose:
            print(f"[{self._client.summary}]", file=sys.stderr)

    def forget(self) -> None:
        """Start over, with the system message only."""
        self._messages = [message for message in self._messages if message["role"] == "system"]


def _dialogue(conversation: _Conversation, model: str) -> int:
    try:
        importlib.import_module("readline")  # gives input() line editing and a history
    except ImportError:
        pass  # a Python built without it; input() works, with less comfort
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""  # a pipe gets the answers alone
    print(f"{model}; /new starts over, Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return ExitCode.OK
        except UnicodeDecodeError:
            raise ChatError("standard input is not UTF-8") from None
        if not text:
            continue
        if text == "/new":
            conversation.forget()
            continue
        try:
            conversation.ask(text)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
        except ChatError as error:
            print(f"kvferry: {error}", file=sys.stderr)
