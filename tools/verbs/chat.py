"""Talk with a model, turn by turn. On a terminal answers are rendered as they arrive; from a pipe each line is a turn.

/help lists what can be typed besides questions. Ctrl-C stops an answer, Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from graphrt.tools.adapter_flags import add_adapter_arguments
from graphrt.tools.before_weights import before_weights
from graphrt.tools.common import (
    MODEL_HELP,
    add_session_arguments,
    add_template_argument,
    add_tp_argument,
    load_model,
    over_ranks,
    read_text,
    session_options,
    use_template,
    whole,
)
from graphrt.tools.sampling import flags

if TYPE_CHECKING:
    from graphrt.models.model import Model
    from graphrt.models.sampling_params import SamplerParams
    from graphrt.models.session import Session
    from graphrt.tools.chat.conversation import Conversation
    from graphrt.tools.chat.reading import Reader

#: Flags whose value may start with a dash.
TEXT_FLAGS = ("-sys", "--system", *flags.TEXT_FLAGS)

NO_TEMPLATE = (
    "this model's file has no chat template: it goes on with a transcript of `User:` and `Assistant:`; "
    "--chat-template-file gives it another form"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-sys", "--system", metavar="TEXT", help="system message for the chat template")
    predict = "the most tokens of an answer, -1: no limit (default: -1)"
    parser.add_argument("-n", "--predict", type=whole(-1), default=-1, metavar="N", help=predict)
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    _add_chat_arguments(parser)
    parser.add_argument("--exact", action="store_true", help="only reference forms of the ops: slower, to compare with")
    parser.add_argument(
        "--memory", action="store_true", help="print the memory of weights and cache (on a GPU it always is)"
    )
    parser.set_defaults(raw=False)
    add_tp_argument(parser)
    add_session_arguments(parser)
    add_adapter_arguments(parser)
    flags.add_text_arguments(parser)
    flags.add_sampling_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    shift = "when the context is full, answers end there; else the oldest turns leave it"
    parser.add_argument("--no-context-shift", action="store_true", help=shift)
    add_template_argument(parser)
    parser.add_argument(
        "--no-markdown", action="store_true", help="show answers as they are, without rendering Markdown"
    )
    history = "keep nothing of what is typed; else a file in the cache has it, for the arrow keys"
    parser.add_argument("--no-history", action="store_true", help=history)


def main(args: argparse.Namespace) -> int:
    if over_ranks(args):
        from graphrt.tools.ranks.launch import run_on_ranks

        return run_on_ranks("chat", args, talk, lambda: "", partial(_check, args), talks=True)
    return talk(args)


def talk(args: argparse.Namespace, _: str = "") -> int:
    """The chat. Several ranks call it together (args.as_ranks), and the first one talks."""
    sampling, rules = flags.sampler_params(args), flags.text_options(args)
    model = load_model(args, args.exact, partial(before_weights, args, {}))
    session = model.session(session_options(args))
    for sentence in session.fallbacks():
        print(f"fallback: {sentence}", file=sys.stderr)
    if model.ranks is not None and model.ranks.rank:
        from graphrt.tools.chat.rank_reader import follow

        follow(model.ranks, model, session)
        return 0
    code = _converse(args, _conversation(args, model, session, sampling, rules))
    if model.ranks is not None:
        model.ranks.told(None)  # the others have nothing more to do
    return code


def _check(args: argparse.Namespace) -> None:
    """Raises for what is wrong whatever the model is, before there are ranks."""
    from graphrt.tools.chat import saved

    flags.sampler_params(args)
    flags.text_options(args)
    if args.load is not None:
        saved.read(args.load)
    if args.chat_template_file is not None:
        read_text(args.chat_template_file)


def _converse(args: argparse.Namespace, conversation: Conversation) -> int:
    from graphrt.tools.chat.loop import converse
    from graphrt.tools.chat.screen import standard

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return 2 if converse(conversation, standard()) else 0

    from graphrt.tools.chat.terminal import Terminal, history_file

    screen = Terminal(None if args.no_history else history_file())
    screen.say(f"{conversation.model_name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
    converse(conversation, screen)
    return 0


def from_run(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of a chat for `graphrt run` without a prompt."""
    defaults = {"no_context_shift": False, "chat_template_file": None, "no_markdown": False, "no_history": False}
    predict = -1 if args.predict is None else args.predict
    return argparse.Namespace(**(vars(args) | defaults | {"load": None, "predict": predict}))


def _conversation(
    args: argparse.Namespace, model: Model, session: Session, sampling: SamplerParams, rules: dict[str, Any]
) -> Conversation:
    from graphrt.models.chat import ChatTemplate
    from graphrt.tools.chat import plain_template
    from graphrt.tools.chat.conversation import Conversation
    from graphrt.tools.chat.settings import Settings

    use_template(model, args)
    template = model.chat_template
    if template is None:
        template = ChatTemplate(plain_template.SOURCE)
        rules["stop"] = [*rules["stop"], plain_template.STOP]
        print(NO_TEMPLATE, file=sys.stderr)
    conversation = Conversation(
        model, session, template, Settings(sampling, args.predict, not args.no_markdown), rules=rules,
        shifts=not args.no_context_shift, reader=_reader(model, session),
    )  # fmt: skip
    if args.load is not None:
        conversation.load(args.load)
    if args.system:
        conversation.system = args.system
    return conversation


def _reader(model: Model, session: Session) -> Reader:
    from graphrt.tools.chat.rank_reader import LeadingReader
    from graphrt.tools.chat.reading import Reader

    return Reader(model, session) if model.ranks is None else LeadingReader(model, session, model.ranks)
