"""The `lit-effattn` command: its help and error messages. `cli.command`, which is slow to import, does the rest."""

import os
import re
import select
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.trust import may_name_modules
from lit_effattn.settings.tools import add_trust, tool_parser
from lit_effattn.stopping import Stopped, stoppable

# Lightning 2.6 itself uses deprecated functions of jsonargparse; users cannot change that.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

HELP = """\
usage: lit-effattn [-h] [--version] COMMAND [OPTIONS]

Train, resume, test and sample models whose attention costs less than N².

commands:
  data       show the folders of the data, their content and a few samples, before training
             data prepare INPUT FOLDER: tokenize a text larger than memory, in parallel
  fit        train a model, or resume with --ckpt_path last
  validate   score a checkpoint on the validation data
  test       score a checkpoint on the test data
  predict    score each test item separately, into a CSV file, or translate, pronounce, transcribe: predict INPUT ...
             predict --stream FILE: recognise phones while somebody speaks; -: a microphone's pipe
  generate   draw samples from a checkpoint
  convert    convert a folder of Hugging Face weights to a checkpoint, or back: convert FROM TO
  export     write a checkpoint for other programs: ONNX, torch.export or safetensors
  compare    show several runs side by side: settings, metrics, cost
  report     write one HTML page about a run: curves, cost, samples, attention pictures
  sweep      train several attention kinds on the same data, each at its best learning rate
  models     list the trained models that are shipped, or show the card of one: models digits
  configs    list the shipped configurations, or show one: configs digits_linear
  check      check the laws that modules with a state keep: check my_module.MyAttention, check torch.nn.GRU
  kinds      list the attention kinds, or the options of one: kinds LinearAttention

examples:
  lit-effattn fit --config digits_linear
  lit-effattn fit --config digits_linear --model.backbone.attention SoftmaxAttention
  lit-effattn fit --ckpt_path last
  lit-effattn test --ckpt_path best
  lit-effattn generate --ckpt_path best --n 64 --complete 0.5
  lit-effattn generate --ckpt_path model:stdlib --prompt "def "

Options of a command: lit-effattn COMMAND --help, with Lightning's trainer: --help all. Those of a class, with any
command: --model.help PixelModel, --model.backbone.help Transformer, --model.backbone.attention.help LinearAttention,
--data.help PixelSequences.
The settings that a command would use: --print_config. Full traceback of an error: LIT_EFFATTN_DEBUG=1.
"""
FIRST = """\
Three commands to begin with:

  lit-effattn generate --ckpt_path model:digits --n 12 --complete 0.5    # draw with a model that is installed
  lit-effattn fit --config digits_linear                                 # train one: 3 minutes on 2 cores, no download
  lit-effattn generate --ckpt_path best --n 12 --complete 0.5            # draw with yours

All commands: lit-effattn --help
"""
"""The message without arguments."""
COMMANDS = ("fit", "validate", "test", "predict", "generate", "data")
DEBUG = "LIT_EFFATTN_DEBUG"
CONVERT = "convert"
TOOLS = {
    "compare": "lit_effattn.analysis.compare",
    "report": "lit_effattn.analysis.report",
    "sweep": "lit_effattn.analysis.sweep",
    "export": "lit_effattn.cli.export",
}
"""Commands with parsers of their own, and the modules that define them."""
CHECK = "check"
LISTS = {
    "configs": ("lit_effattn.settings.shipped", "configs"),
    "kinds": ("lit_effattn.settings.kinds", "kinds"),
    "models": ("lit_effattn.settings.cards", "cards"),
}
"""Commands that print lists, with their modules and functions. They do not import Lightning, which is slow."""
INTERRUPTED, UNREAD = 130, 141  # the exit codes after Ctrl-C, and after a closed output pipe, as shells expect


def main(args: list[str] | None = None) -> None:
    """Run the command. An error of the user ends it with one message and exit code 1 or 2.

    A signal ends it with 128 + the signal's number: see `lit_effattn.stopping`.
    A closed output pipe, as in `lit-effattn kinds | head -3`, ends it without a message.
    """
    try:
        with stoppable():
            try:
                _main(args)
            finally:
                sys.stdout.flush()
    except Stopped as stop:
        if stop.code and not stop.message and not isinstance(stop.__context__, Stopped):
            print(f"\nStopped by {stop.name}.", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except MemoryError as error:
        if os.environ.get(DEBUG):
            raise
        fail(" ".join(f"there is too little memory. {error}".split()))
    except BrokenPipeError as error:
        if not _is_stdout_closed():
            fail(_message(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python exits
        sys.exit(UNREAD)


def _is_stdout_closed() -> bool:
    """Return whether the pipe of the standard output is closed. Other pipes may break, too."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _main(args: list[str] | None) -> None:
    args = sys.argv[1:] if args is None else args
    if not args:
        print(FIRST, end="", file=sys.stderr)
        sys.exit(2)  # as after other invalid arguments: a script whose arguments are empty has not succeeded
    if args[0] in ("-h", "--help"):
        return print(HELP, end="")
    if args[0] == "--version":
        from importlib.metadata import version

        return print(f"lit-effattn {version('lit-effattn')}")
    may_name_modules(" ".join(args))
    if args[0] in LISTS:
        return _list(args[0], args[1:])
    if args[0] == CONVERT:
        return _convert(args[1:])
    if args[0] == CHECK:
        from lit_effattn.laws import command

        return command.main(args[1:], f"lit-effattn {CHECK}")
    if args[0] not in (*COMMANDS, *TOOLS):
        known = ", ".join((*COMMANDS, *TOOLS, CONVERT, CHECK, *LISTS))
        fail(f"{args[0]!r} is not a command; there are {known}", code=2)
    from lit_effattn.cli.command import run
    from lit_effattn.cli.output import quieten
    from lit_effattn.cli.parser import UsageError

    quieten()

    function: Callable[[list[str]], None] = run
    rest = args
    if args[0] == "predict" and any(arg.partition("=")[0] == "--stream" for arg in args):
        function, rest = import_module("lit_effattn.cli.stream").stream, args[1:]
    elif args[0] in TOOLS:
        function, rest = getattr(import_module(TOOLS[args[0]]), args[0]), args[1:]
    if os.environ.get(DEBUG):
        return function(rest)
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lit_effattn.cli.failures import explained

    try:
        function(rest)
    except UsageError as error:
        fail(str(error), code=2)
    except Stopped:
        raise
    except SystemExit as error:
        # Lightning turns Ctrl-C into the exit code 1.
        sys.exit(INTERRUPTED if isinstance(error.__context__, KeyboardInterrupt) else error.code)
    except RuntimeError as error:
        if (message := explained(error, args[0])) is None:
            raise
        fail(message)
    except BrokenPipeError:
        raise
    # Errors of our checks and of libraries: the message names the cause, a traceback would not help.
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError, MisconfigurationException) as error:
        fail(_message(error))


def _list(command: str, names: list[str]) -> None:
    """Print the shipped configurations, the attention kinds or the shipped models."""
    if {"-h", "--help"} & set(names):
        print(f"usage: lit-effattn {command} [NAME ...]\n\nList the {command}; with names, show these.")
        return
    module, function = LISTS[command]
    try:
        print(printable(getattr(import_module(module), function)(names)))
    except (FileNotFoundError, ValueError) as error:
        fail(str(error), code=2)


def _convert(args: list[str]) -> None:
    parser = tool_parser(
        CONVERT,
        "Convert a folder of Hugging Face weights (GPT-2, Llama, Mistral, Qwen) to a checkpoint with a "
        "configuration, in the new folder TO; or a checkpoint to such a folder. Nothing is downloaded.",
    )
    parser.add_argument("source", metavar="FROM", help="The folder, or the checkpoint.")
    parser.add_argument("target", metavar="TO", help="The folder to make.")
    add_trust(parser)
    try:
        options = parser.parse_args(args)
        from lit_effattn.interchange.convert import convert

        warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
        print(printable(convert(options.source, options.target, trust=options.trust)))
    except (OSError, ValueError) as error:
        if os.environ.get(DEBUG):
            raise
        fail(_message(error))


def _message(error: BaseException) -> str:
    """Return the message of `error`; for an error in a data loader process, the message of the original error."""
    text = str(error).strip() or type(error).__name__
    if text.startswith("Caught ") and "\nOriginal Traceback" in text:
        text = text.splitlines()[-1].partition(": ")[2] or text.splitlines()[-1]
    return text


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error and exit, with code 2 for invalid arguments and code 1 for any other error."""
    line = re.sub(" *\n *", " ", message.strip(" \n"))
    print(f"lit-effattn: error: {printable(line)}", file=sys.stderr)
    if code == 1:
        print(f"(set {DEBUG}=1 in the environment to see the traceback)", file=sys.stderr)
    sys.exit(code)
