"""The `lit-effattn` command: a LightningCLI with a folder for each run and the configuration in checkpoints."""

import errno
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partialmethod
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import Namespace, set_dumper, set_loader, set_parsing_settings
from jsonargparse.typing import register_type
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

# These imports make the classes known by their short names in YAML and flags. That of `tasks` does so for models.
from lit_effattn import callbacks, datamodules
from lit_effattn.callbacks.lightning_internals import leave_signals_alone
from lit_effattn.checkpoints.averaging import average_parameters
from lit_effattn.checkpoints.io import AtomicCheckpointIO, read_checkpoint, saved_model, without_folders
from lit_effattn.checkpoints.loading import OtherModelError, allowed_in, build_model
from lit_effattn.checkpoints.plain_yaml import OutOfBoundsError, SafeLoader
from lit_effattn.checkpoints.printable import cut, printable
from lit_effattn.checkpoints.run_lock import RunLock
from lit_effattn.checkpoints.runs import discard, discard_if_empty, find_checkpoint, new_folder, short
from lit_effattn.checkpoints.trust import find
from lit_effattn.cli.data import show_data
from lit_effattn.cli.help import class_help
from lit_effattn.cli.parser import Parser, integers_first
from lit_effattn.cli.prepare import prepare
from lit_effattn.cli.threads import few_threads
from lit_effattn.distributed import strategies
from lit_effattn.distributed.sharding import ShardedStrategy
from lit_effattn.hparams import flat
from lit_effattn.nn.transfer import begin_transfer
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.building import Builder, build_data
from lit_effattn.settings.defaults import TRAINER
from lit_effattn.settings.derived import leave_out, set_strides, set_windows
from lit_effattn.settings.initial_weights import add_missing, remedy
from lit_effattn.settings.resume import (
    CHECKPOINT,
    OF_FIT,
    changes_scores,
    check_kept_settings,
    check_patience,
    fixed_by_data,
    resolve,
    section,
)
from lit_effattn.settings.run_folder import RUN, Configuration, is_child, is_first, run_folder, stated_root
from lit_effattn.settings.tools import ROOT, TRUST
from lit_effattn.settings.trainer import Trainer, announce_unvalidated, as_list, check_trainer, loggers, own_loggers
from lit_effattn.settings.yaml_text import dump_yaml, load_yaml
from lit_effattn.tasks import Task
from lit_effattn.tasks.options import flags

__all__ = ["CLI", "callbacks", "datamodules", "run", "strategies"]

register_type(torch.device, str, torch.device)  # else a configuration has a remark in place of a device

_USAGE = "lit-effattn {} [--config NAME_OR_FILE] [--GROUP.OPTION VALUE ...]"
_ABOUT = {
    "fit": "Train a model; with --ckpt_path, resume the run of a checkpoint exactly where it stopped.",
    "validate": "Score a checkpoint on the validation data.",
    "test": "Score a checkpoint on the test data.",
    "predict": "Score each test item separately, into a CSV file; or predict the arguments that are not options: texts "
    "to translate, pronounce or classify, recordings to transcribe. Phones while somebody speaks: predict "
    "--stream FILE, or - for a pipe; its options: predict --stream - --help.",
    "generate": "Draw samples from a checkpoint.",
}
_ABOUT_CHECKPOINT = "The checkpoint: its path, or `last` or `best` of the newest run."
_ABOUT_SHIPPED = "Or `model:NAME`: one of `lit-effattn models`."
_ABOUT_RESUMING = "Training resumes from it, with its configuration. Default: a new run."
_ABOUT_NAME = (
    "Name of the run: its folder is runs/NAME/TIME. `last` and `best` are then of the newest run of this name. "
    "Default: the configuration's name, if its trainer.default_root_dir ends in it, and the classes that flags name in "
    "place of its own."
)
_ABOUT_AVERAGE = "Number of last kept checkpoints (--checkpoint.keep) of the run of --ckpt_path that are averaged."
_ABOUT_WEIGHTS = {
    "init_weights": "Start from the weights of this checkpoint (a path, `last`, `best` or `model:NAME`), with "
    "everything else new, for fine-tuning. To resume a run, use --ckpt_path.",
    "transfer_from": "Start from the weights of this checkpoint, and train the attention alone, where it differs from "
    "the checkpoint's: each layer learns its output. Fine-tune the result with --init_weights.",
}
_ABOUT_DATA = (
    "Show the folders of a configuration's data, their content, and samples: --config NAME_OR_FILE --data.… "
    "Tokenize a large text: lit-effattn data prepare --help."
)


def run(args: list[str]) -> None:
    """Parse `args` and run the command."""
    if args[:2] == ["data", "prepare"]:
        prepare(args[2:])
        return
    # Enforce jsonargparse's denylist; build no classes where any value is accepted.
    set_parsing_settings(import_path_denylist=[], instantiate_subclass_spec_in_any=False)
    # Lightning's builds every loader, and jsonargparse formats the data into messages that it does not print.
    pl.LightningDataModule.__str__ = object.__str__  # type: ignore[method-assign]
    set_loader("yaml", load_yaml, (yaml.YAMLError, OutOfBoundsError))
    set_dumper("yaml", dump_yaml)
    arguments = Arguments(args)
    if class_help(arguments, lambda: Parser(prog=f"lit-effattn {arguments.command}")):
        return
    _ = arguments.stated  # reads the files that settings name, so that an error in one is reported with its name
    _ = arguments.trust  # an error in a name is reported, although the name may not be needed
    if arguments.command == "data":
        show_data(arguments, Parser(prog="lit-effattn data", description=_ABOUT_DATA))
        return
    try:
        CLI(arguments)
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = os.environ.get(RUN, error.filename)  # of a log: it names no file
        raise
    finally:
        if not is_child():
            if RUN in os.environ:
                discard_if_empty(Path(os.environ.pop(RUN)))
            os.environ.pop(CHECKPOINT, None)


class CLI(LightningCLI):
    """A LightningCLI with one folder for each run. A run's configuration, files and flags are parsed in this order."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self._new_folder: Path | None = None  # of a new run
        self._lock: RunLock | None = None
        self._data: pl.LightningDataModule | None = None
        resolved = resolve(arguments)
        self.resolved, self._content = resolved._replace(content=None), resolved.content  # until it is loaded
        self._builder = Builder()
        if resolved.checkpoint is not None:
            os.environ[CHECKPOINT] = str(resolved.checkpoint)
            if not resolved.data_fixes and (spec := saved_model(resolved.content or {})) is not None:
                self._builder = Builder(spec, allowed_in(resolved.checkpoint, arguments.trust.names))
        try:
            super().__init__(
                model_class=Task,
                datamodule_class=pl.LightningDataModule if self.resolved.uses_data else None,
                trainer_class=Trainer,
                seed_everything_default=0,
                parser_class=Parser,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                save_config_callback=None,
                load_from_checkpoint_support=False,  # tasks know their own arguments: see lit_effattn.hparams
                parser_kwargs={
                    arguments.command: {
                        "usage": _USAGE.format(arguments.command),
                        "description": _ABOUT[arguments.command],
                        "command": arguments.command,
                        "all_options": arguments.flags.text("help") == "all",
                    }
                },
                args=self.resolved.args,
            )
        finally:
            if self._lock is not None:
                self._lock.release()

    # -------------------------------------------------------------------------------------------------------- parsing

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static there
        """Return the current command alone, since each parser takes a third of a second.

        Its value: the parameters that are not options, or are options of our own.
        """
        commands = {**LightningCLI.subcommands(), "generate": {"model", "datamodule"}}
        own = {"ckpt_path", "weights_only", "verbose"}  # a file is never unpickled, and metrics are printed once
        return {self.arguments.command: commands[self.arguments.command] | own}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the trainer, the model unless its file alone describes it, and the data."""
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER.items()})
        if not self.resolved.describes:
            given = set() if self.resolved.data_fixes else fixed_by_data()  # which `Builder` adds
            parser.add_subclass_arguments(Task, "model", fail_untyped=False, required=True, skip=given)
        parser.add_subclass_arguments(
            pl.LightningDataModule, "data", fail_untyped=False, required=self.resolved.uses_data
        )

    def add_arguments_to_parser(self, parser: Parser) -> None:  # type: ignore[override]  # `parser_class`
        """Add the options of this command, and link the arguments of the model that the data determine."""
        parser.add_argument("--trust", type=list[str] | None, default=None, metavar="NAME", help=TRUST)
        parser.add_argument("--name", type=str | None, default=None, help=_ABOUT_NAME)
        more = _ABOUT_RESUMING if self.arguments.command == "fit" else _ABOUT_SHIPPED
        start = parser.add_argument_group("a checkpoint to start from")
        start.add_argument("--ckpt_path", type=str | None, default=None, help=f"{_ABOUT_CHECKPOINT} {more}")
        if self.arguments.command == "generate":
            for name, option in flags().items():
                parser.add_argument(f"--{name}", type=option.annotation | None, default=None, help=option.doc)
        if self.arguments.command != "fit":
            parser.add_argument("--average", type=int | None, default=None, help=_ABOUT_AVERAGE)
            parser.ignore(OF_FIT)
        else:
            parser.add_class_arguments(callbacks.LastCheckpoint, "checkpoint")
            for name, text in _ABOUT_WEIGHTS.items():
                parser.add_argument(f"--{name}", type=str | None, default=None, help=text)
        for name in sorted(fixed_by_data()) if self.resolved.data_fixes and not self.resolved.describes else ():
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        integers_first(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the run's configuration, files and flags."""
        command = self.arguments.command
        if self.arguments.flags.given("print_config"):  # which `parser` prints
            if "skip_null" in (self.arguments.flags.text("print_config") or ""):
                raise ValueError(
                    "--print_config=skip_null leaves out null where another value is the default, so the result "
                    "means other settings; give --print_config=skip_default"
                )
            parser.parse_args(args)
        # `parser` would parse all settings a second time, and LightningCLI has no public name for a command's parser.
        of_command: Any = self._parser(command)
        parsed = of_command.parse(args[1:], self.arguments, self.resolved.run)
        if self.resolved.takes_inputs is not None:  # jsonargparse copies a list once for each of its items
            parsed.data.init_args[self.resolved.takes_inputs] = self.arguments.inputs
        seed = parsed.seed_everything
        if not 0 <= seed < 2**32:
            raise ValueError(f"--seed_everything {seed} must be from 0 to {2**32 - 1}; true: a random one")
        self.config = Namespace({"subcommand": command, command: parsed})

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would silently override flags with the hyper-parameters of the checkpoint.

        There is no public way to switch that off.
        """

    # -------------------------------------------------------------------------------------------------- instantiation

    def instantiate_classes(self) -> None:
        """Build the data, the model and the trainer."""
        config = self.config[self.subcommand]
        if self._data is not None:  # it was built for the settings that follow from it
            self.config[self.subcommand] = Namespace({**vars(config), "data": self._data})
        with self._builder.errors():
            self.config_init = self.parser.instantiate_classes(self.config)
        self.config[self.subcommand] = config
        made = self.config_init[self.subcommand]
        self.datamodule = made.get("data")
        self.model = self._model_of_file() if self.resolved.describes else made.model
        self.trainer = self.instantiate_trainer()

    def _model_of_file(self) -> Task:
        """Build the model that the checkpoint alone describes."""
        path, content = self.resolved.checkpoint, self._content
        assert path is not None
        assert content is not None
        model = build_model(Task, path, content, self.arguments.trust.names)
        saved = section(content, "hyper_parameters")
        for name in model.fixed_by_data if self.resolved.data_fixes else ():
            given = _without_tuples(getattr(self.datamodule, name, None))
            if name in saved and given is not None and given != _without_tuples(saved[name]):
                raise ValueError(
                    f"{short(path)} was trained on other data: its {name} is {cut(saved[name])}, and that of these "
                    f"data {cut(given)}"
                )
        return model

    def before_instantiate_classes(self) -> None:
        """Complete the settings; reject those that the data or resuming would override."""
        config = self.config[self.subcommand]
        if not self.resolved.uses_data:
            config.data = None
        for name in fixed_by_data() if self.resolved.data_fixes else ():
            if self.arguments.flags.given(f"model.{name}"):
                raise ValueError(f"--model.{name} can't be given: the model takes it from the data")
        for name in ("callbacks", "logger", "plugins"):  # those that a flag appends again are in a resumed run's list
            if isinstance(given := config.trainer.get(name), list):
                config.trainer[name] = [item for i, item in enumerate(given) if item not in given[:i]]
        if not self.resolved.describes:
            leave_out(config, self.arguments)
            set_windows(config, self.arguments)
            if config.get("data"):
                resumes = self.resolved.run is not None
                set_strides(config, self.arguments, lambda: self._data_of(config), resumes=resumes)
        self._read_checkpoints_safely(config.trainer.get("strategy"))
        self._find_weights(config)
        self.parser.add_instantiator(self._builder, object)
        saved = saved_model(self._content or {})
        if self.arguments.command == "fit" and saved is not None and not self.resolved.requeued:
            check_kept_settings({"model": saved}, self.settings)
        if self.arguments.files and self.resolved.run is not None and not self.resolved.requeued:
            self._warn_of_replaced(self.resolved.run)

    def _warn_of_replaced(self, run: dict[str, Any]) -> None:
        """Warn of settings of the run that `--config` overrides, or defaults of a class that a flag names."""
        before, now = (
            {re.sub(r"\.0\b", "", name): value for name, value in flat(self._compared(settings)).items()}
            for settings in (run, self.settings)  # a list of one attention is that attention
        )
        replaced = [
            f"{name} is {now[name]}, in the run {value}"
            for name, value in before.items()
            if value != now.get(name, value) and not self.arguments.flags.given(re.sub(r"\.\d+\b", "", name))
        ]
        if replaced:
            rank_zero_warn(
                f"--config overrides settings of the run: {'; '.join(replaced)}. --name and --trainer.default_root_dir "
                "find a run without overriding any"
            )

    def _compared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what `--config` may override: of the callbacks the names, if no flag is about them."""
        trainer = {k: v for k, v in section(settings, "trainer").items() if k not in ("default_root_dir", "callbacks")}
        if not self.arguments.flags.at("trainer.callbacks"):
            given = as_list(section(settings, "trainer").get("callbacks"))
            used = [callback for callback in given if self.subcommand == "fit" or changes_scores(callback)]
            trainer["callbacks"] = ", ".join(callback["class_path"].rpartition(".")[2] for callback in used) or "none"
        return {"model": section(settings, "model"), "data": section(settings, "data"), "trainer": trainer}

    def _find_weights(self, config: Namespace) -> None:
        """Replace `last` and `best`, which later name other checkpoints, with paths.

        A resumed run does not need its initial weights.
        """
        if self.arguments.command != "fit":
            return
        given = self.arguments.flags.given("init_weights") and not self.resolved.requeued
        if self.resolved.checkpoint is not None and not given:
            config.init_weights = None
        for name in ("init_weights", "transfer_from"):
            if config[name] is not None:
                config[name] = short(find_checkpoint(config[name], stated_root(self.arguments), option=f"--{name}"))

    def _data_of(self, config: Namespace) -> pl.LightningDataModule:
        """Build the data module, once."""
        self._data = self._data or build_data(config.data.clone())
        return self._data

    def _read_checkpoints_safely(self, strategy: Any) -> None:
        """Replace Lightning's `ModelParallelStrategy` with `ShardedStrategy`, with the options that the user gave."""
        if not isinstance(strategy, Namespace) or find(strategy.class_path) is not ModelParallelStrategy:
            return
        strategy.class_path = f"{ShardedStrategy.__module__}.{ShardedStrategy.__name__}"
        if not self.arguments.stated.given("trainer.strategy.save_distributed_checkpoint"):
            strategy.init_args.save_distributed_checkpoint = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings as plain data, without the arguments that the data determine."""
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False, skip_validation=True)
        settings = without_folders(yaml.load(text, SafeLoader))
        for name in ("trust", "name"):  # for this command only; the folder has the name
            settings.pop(name, None)
        return settings

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer: its root is the folder of the run, and it has the callbacks that every run has."""
        config = self.config_init[self.subcommand].trainer
        check_trainer(config, str(self.subcommand))
        if self.subcommand == "fit" and self._content is not None:
            check_patience(as_list(config.callbacks), self._content)
        quiet = bool(config.fast_dev_run)
        folder = Path(config.default_root_dir or ROOT)
        if not quiet:
            folder, is_new = run_folder(str(self.subcommand), self.resolved.checkpoint, folder)
            self._new_folder = folder if is_new else None
        if self.subcommand == "fit" and not quiet:
            announce_unvalidated(config)
            if not is_child() and is_first():
                self._lock = RunLock(folder)
        kwargs["default_root_dir"] = str(folder)
        # An interval in batches counts across epochs, so it may exceed an epoch; Lightning fails if both are numbers.
        if not isinstance(config.val_check_interval, int):
            kwargs["check_val_every_n_epoch"] = config.check_val_every_n_epoch or 1
        if config.accelerator == "auto" and torch.backends.mps.is_available():
            kwargs["accelerator"] = "cpu"
            rank_zero_info(
                "--trainer.accelerator auto: the CPU is used, since Apple's GPUs have no float64, in which losses are "
                "summed"
            )
        if config.devices == "auto" and self.subcommand in ("predict", "generate"):
            kwargs["devices"] = 1  # else all GPUs of the machine, and these commands run on one process
        kwargs["plugins"] = [*as_list(config.plugins), AtomicCheckpointIO(self._reader())]
        kwargs["logger"] = False if quiet else loggers(config.logger, folder)
        kwargs["callbacks"] = [*as_list(config.callbacks), *self._standard_callbacks(config, quiet, kwargs)]
        if any(isinstance(callback, callbacks.ParameterSummary) for callback in kwargs["callbacks"]):
            kwargs["enable_model_summary"] = False  # else Lightning logs a remark
        try:
            trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, RuntimeError) as error:  # of Lightning's checks
            raise ValueError(f"the trainer can't be built: {error}") from error
        if isinstance(launcher := trainer.strategy.launcher, _MultiProcessingLauncher):
            raise ValueError(
                f"--trainer.strategy starts processes by {launcher._start_method}, which do not run this command: give "
                "ddp, whose processes do"
            )
        if self.subcommand in ("predict", "generate") and trainer.world_size > 1:
            raise ValueError(f"{self.subcommand} runs on 1 process, not {trainer.world_size}: give --trainer.devices 1")
        leave_signals_alone(trainer)
        return trainer

    def _reader(self) -> Callable[[Path], dict[str, Any]] | None:
        """Return the function that reads the checkpoint; None for a folder, of which each process reads its parts."""
        checkpoint, averaged, model = self.resolved.checkpoint, self.resolved.averaged, self.model
        if checkpoint is None or (checkpoint.is_dir() and not averaged):
            return None

        def read(path: Path) -> dict[str, Any]:
            content, self._content = (None if checkpoint.is_dir() else self._content), None
            content = content if content is not None and path == checkpoint else read_checkpoint(path)
            if averaged:
                average_parameters(content, averaged, model)
            return content

        return read

    def _standard_callbacks(self, config: Any, quiet: bool, kwargs: dict[str, Any]) -> list[pl.Callback]:
        own = {type(callback) for callback in as_list(config.callbacks)}
        standard: list[pl.Callback] = []
        if config.enable_progress_bar is not False and not any(issubclass(t, pl.callbacks.ProgressBar) for t in own):
            standard.append(callbacks.ProgressBar())
        standard.append(callbacks.StopOnSignal())
        if self.subcommand != "fit":
            return standard
        if config.enable_model_summary is not False and not any(issubclass(t, pl.callbacks.ModelSummary) for t in own):
            standard.append(callbacks.ParameterSummary())
        run = self.resolved.run
        seed_kept = run is None or run.get("seed_everything") == self.settings.get("seed_everything")
        if callbacks.CheckFinite not in own:
            standard.append(callbacks.CheckFinite())
        standard += [
            callbacks.RandomStates(restore=seed_kept),
            callbacks.CostLog(),
            Configuration(self.settings, self.arguments.typed, own_loggers(config.logger)),
        ]
        if kwargs["logger"] and LearningRateMonitor not in own:
            standard.append(LearningRateMonitor("step"))
        if config.enable_checkpointing is not False and not quiet:
            standard.append(self.config_init[self.subcommand].checkpoint)
        return standard

    # --------------------------------------------------------------------------------------------------- the commands

    def before_fit(self) -> None:
        """Load the weights of `--init_weights` or `--transfer_from`, and prepare the attention transfer."""
        config = self.config[self.subcommand]
        resumes = self.resolved.checkpoint is not None
        if config.init_weights is not None:
            for name, other in (("--ckpt_path", resumes), ("--transfer_from", config.transfer_from is not None)):
                if other:
                    raise ValueError(
                        f"--init_weights and {name} were both given; give the first for a new run, --ckpt_path to "
                        "resume, --transfer_from for attention transfer"
                    )
            self._load_weights("--init_weights", config.init_weights)
        if config.transfer_from is not None:
            path = config.transfer_from
            teacher = Task.load_from_checkpoint(path, map_location="cpu", trust=self.arguments.trust.names)
            if not resumes:
                self._load_weights("--transfer_from", path)
            warnings.filterwarnings("ignore", ".*in eval mode at the start of training.*")  # dropout is off
            n = begin_transfer(self.model, teacher)
            rank_zero_info(f"Attention transfer: {n} layers learn the attention of {short(path)}; the rest is frozen")

    def _load_weights(self, option: str, path: str) -> None:
        checkpoint = read_checkpoint(path)
        kept = add_missing(self.model, checkpoint["state_dict"])
        try:
            self.model.on_load_checkpoint(checkpoint)
        except OtherModelError as error:
            advice = remedy(self.model, checkpoint["state_dict"])
            raise ValueError(f"{option} {path}: {error.difference}. {advice}") from error
        saved = checkpoint.get("hyper_parameters", {}).get("tokenizer")
        own = getattr(self.datamodule, "tokenizer", None)
        if None not in (saved, own) and saved != own:  # a classifier has no `numbering` of tokens
            raise ValueError(
                f"{option} {path}: its tokens are not those of the data, so the same number means another one; "
                f"--data.tokenizer_of {path} reads the texts with its vocabulary"
            )
        self.model.load_state_dict(checkpoint["state_dict"])
        rank_zero_info(f"Starting from the weights of {short(path)}")
        if kept:
            rank_zero_info(f"Not in the checkpoint, so kept as this model initialised them: {', '.join(kept)}")

    def fit(self, **kwargs: Any) -> None:
        """Train. If a new run fails before its first step, its folder is deleted."""
        try:
            self.trainer.fit(**self._with_checkpoint(kwargs))
        except BaseException:
            folder = self._new_folder
            if folder is not None and self.trainer.global_step == 0 and not any(folder.rglob("*.ckpt")):
                discard(folder)
            raise

    def after_fit(self) -> None:
        """Print the best value of the monitored metric and its checkpoint, if there is one."""
        best = next((c for c in self.trainer.checkpoint_callbacks if isinstance(c, callbacks.BestCheckpoint)), None)
        if best is not None and best.best_model_path and best.best_model_score is not None:
            rank_zero_info(f"{best.monitor} {best.best_model_score:.4f} is the best, in {short(best.best_model_path)}")

    def _with_checkpoint(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "ckpt_path": self.config[self.subcommand].ckpt_path}

    def validate(self, **kwargs: Any) -> None:
        """Score the validation data, without Lightning's table of results."""
        self.trainer.validate(**self._with_checkpoint(kwargs), verbose=False)

    def test(self, **kwargs: Any) -> None:
        """Score the test data, without Lightning's table of results."""
        self.trainer.test(**self._with_checkpoint(kwargs), verbose=False)

    def _print_metrics(self, stage: str) -> None:
        for name, value in self.trainer.callback_metrics.items():
            if name == f"{stage}/per":
                rank_zero_only(print)(f"{stage} PER: {100 * value:.2f} %")
            elif name.startswith(f"{stage}/"):
                shown = name.replace("/", " ").replace("bits_per_", "bits/")
                rank_zero_only(print)(f"{shown}: {value:.4f}" if value.is_floating_point() else f"{shown}: {value:,}")

    after_test, after_validate = partialmethod(_print_metrics, "test"), partialmethod(_print_metrics, "val")

    def predict(self, **kwargs: Any) -> None:
        """Run prediction and let the task write the results."""
        with few_threads(self.model) if self.model.predicts_by_steps else nullcontext():
            predictions: Any = self.trainer.predict(**{**self._with_checkpoint(kwargs), "return_predictions": True})
        folder = new_folder(Path(self.trainer.default_root_dir), "predictions")
        print(printable(self.model.write_predictions(predictions, folder)))

    def generate(self, **kwargs: Any) -> None:
        """Draw samples and print their paths."""
        assert isinstance(self.trainer, Trainer)
        options = {name: self.config_init[self.subcommand][name] for name in flags()}
        with few_threads(self.model):
            print(printable(self.trainer.generate(**self._with_checkpoint(kwargs), **options)))


def _without_tuples(value: Any) -> Any:
    """Return a value with lists in place of tuples, as a checkpoint holds it."""
    return [_without_tuples(item) for item in value] if isinstance(value, (list, tuple)) else value
