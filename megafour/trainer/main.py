"""From a command line to a run: everything that can be refused is refused before any process group exists."""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megafour.checkpoint import folder as checkpoints
from megafour.checkpoint.errors import CheckpointError
from megafour.config.errors import ConfigError, say_error
from megafour.config.launch import Launch, LaunchError
from megafour.config.load import load_config
from megafour.config.notes import say_note
from megafour.config.rules import resolve, smallest_world
from megafour.config.schema import Config
from megafour.cost.describe import describe
from megafour.cost.flops import known_peak
from megafour.data.dataset import Datasets, build_datasets
from megafour.data.description import check_tokenizer, rows_note, tokenizer_info
from megafour.data.errors import DataError, NoSuchFile
from megafour.data.indexed import IndexedDataset, strip_suffix
from megafour.data.tokenizer import Tokenizer, TokenizerInfo, load_tokenizer
from megafour.mesh import Mesh
from megafour.parallel.pipeline.select import check_pipeline
from megafour.trainer.changes import check_allowed
from megafour.trainer.logs import RankLog
from megafour.trainer.loop import Run, TrainingError
from megafour.trainer.memory import keep_heap
from megafour.trainer.metrics import Metrics
from megafour.trainer.peers import lost
from megafour.trainer.run_folder import STOP_FILE, RunFolder, check_resume, leave_preempted, open_run_folder
from megafour.trainer.setup import build_mesh, build_state, choose_device
from megafour.trainer.signals import StopRequest
from megafour.trainer.starting import check_start, start_from, weights_have
from megafour.trainer.step import control_sum, on_host
from megafour.trainer.watch import HangWatch
from megafour.world import start_distributed, stop_distributed


def refuse(error: Exception, code: int, local_rank: int = 0) -> int:
    """Print the error's line and return the exit code.

    `local_rank`: of a rank whose node meets the error together and says it once; 0 says it at once.
    """
    say_error(str(error), local_rank)
    return code


def exit_code(error: Exception) -> int:
    """2 for a mistake in the config or in what it names, 1 for a failure."""
    return 2 if isinstance(error, ConfigError | NoSuchFile) else 1


def check(path: str | None, overrides: list[str], world: int | None) -> int:
    """Validate and resolve without launching; prints what the run would be.

    The number of ranks is `world`, else that of the launch, else the fewest that the mesh takes. A launch that could
    not start gives a note, not an error: nothing is launched here. What the config names is checked as a start would
    check it where it is there; a config may be checked on a machine without its data.
    """
    launch = Launch()
    try:
        launch = Launch.from_environment()
    except ConfigError as error:
        if world is None:
            say_note(str(error))
    try:
        config = load_config(path, overrides)
        ranks = world or (launch.world if launch.world > 1 else smallest_world(config))
        config = resolve(config, ranks)
        check_pipeline(config)
        notes = check_named_files(config, ranks)
        print(describe(config))
        for note in notes:
            print(f"note: {note}")
    except (ConfigError, DataError, OSError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise
        return refuse(error, exit_code(error), launch.local_rank)
    return 0


def check_named_files(config: Config, world: int) -> list[str]:
    """Refuse what a start would refuse of the files that the config names, as far as they are on this machine.

    Returns:
        a line for each that is not, and those that a start would say.
    Raises:
        ConfigError, DataError: as `run` meets them.
    """
    entries = [*config.data.train, *(entry for entries in config.data.valid.values() for entry in entries)]
    here = [entry.path for entry in entries if Path(f"{strip_suffix(entry.path)}.idx").exists()]
    notes = [f"not checked: {entry.path}.idx does not exist here" for entry in entries if entry.path not in here]
    try:
        _, info = open_tokenizer(config)
    except NoSuchFile as error:
        return [*notes, f"not checked: {error}"]
    config, info, lines = with_vocabulary(config, info, world)
    notes += lines
    if len(here) == len(entries):
        build_datasets(config, info)
    else:
        for path in here:
            check_tokenizer(IndexedDataset(path).prefix, info)
    start = config.checkpoint.init_from
    if start is None or Path(start).exists():
        check_start(config, info.hash)
    else:
        notes.append(f"not checked: checkpoint.init_from={start} does not exist here")
    if Path(config.checkpoint_dir).exists():
        check_resume(config)
    return notes


def run(path: str | None, overrides: list[str], launch: Launch, stop: StopRequest,
        allowed: Collection[str] = ()) -> int:
    """Train as the config says.

    Args:
        path, overrides: of the config.
        launch: who this process is.
        stop: listens for signals since the process began.
        allowed: keys whose change since the checkpoint this launch allows.
    """
    try:
        if launch.note is not None:
            say_note(launch.note)
        check_allowed(allowed)
        config = resolve(load_config(path, overrides), launch.world)
        device = choose_device(config, launch)
        tokenizer, info = open_tokenizer(config)
        config, info, notes = with_vocabulary(config, info, launch.world)
        for note in notes:
            say_note(note)
        check_start(config, info.hash, allowed)
        check_resume(config)
        check_pipeline(config)
        datasets = build_datasets(config, info)
        launch.check_address()
    except (ConfigError, DataError, OSError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise
        stop.restore()      # of several ranks that say the same most wait: torchrun's signal may end them
        return refuse(error, exit_code(error), launch.local_rank)
    with ExitStack() as afterwards:
        try:
            return train(config, launch, device, tokenizer, datasets, stop, allowed, afterwards) or 0
        except Exception:
            if "TORCHELASTIC_ERROR_FILE" not in os.environ:
                raise
            return 1        # `record` has told torchrun, which shows the first rank's traceback, once


def open_tokenizer(config: Config) -> tuple[Tokenizer | None, TokenizerInfo]:
    """The run's tokenizer where the config names one, and what is known of it: else what the datasets say."""
    wanted = config.data.tokenizer
    if wanted is None:
        return None, tokenizer_info(config)
    tokenizer = load_tokenizer(wanted.kind, wanted.path)
    return tokenizer, tokenizer.info


def with_vocabulary(config: Config, info: TokenizerInfo, world: int) -> tuple[Config, TokenizerInfo, list[str]]:
    """The config with the model's number of token ids, resolved again; the tokenizer with the ids that the model knows,
    which datasets must keep to; and lines on ids that it does not know.

    Raises:
        ConfigError: as `vocabulary`.
    """
    config = resolve(config.replace({"model.vocab_size": vocabulary(config, info)}), world)
    rows = int(config.model.vocab_size)
    return config, replace(info, vocab_size=min(info.vocab_size, rows)), list(rows_note(info, rows))


def vocabulary(config: Config, info: TokenizerInfo) -> int:
    """The model's vocabulary: the tokenizer's, unless the config asks for more, or a trained embedding has fewer rows.

    Raises:
        ConfigError: for fewer where no weights decide it.
    """
    wanted = config.model.vocab_size
    if not isinstance(wanted, int):
        return info.vocab_size
    if info.hash and wanted < info.vocab_size and not weights_have(config, wanted):
        raise ConfigError(f"model.vocab_size={wanted} is less than the tokenizer's {info.vocab_size} token ids; "
                          f"set model.vocab_size=auto")
    return wanted


@record
def train(config: Config, launch: Launch, device: torch.device, tokenizer: Tokenizer | None,
          datasets: Datasets, stop: StopRequest, allowed: Collection[str], afterwards: ExitStack) -> int:
    """Join the world and train. What one line explains ends with that line; anything else with its traceback.

    `afterwards` takes what may take a few seconds and need not hold other ranks, status.json or torchrun's report.
    """
    if device.type == "cpu":
        keep_heap()
    try:
        start_distributed(launch, device, stopped=stop.asked)
    except LaunchError as error:
        if stop.reason is not None:
            if launch.rank == 0:
                leave_preempted(Path(config.run_dir), f"{stop.reason}, before all ranks had come")
            stop.ignore()
            return 0
        stop.restore()
        return refuse(error, 1, launch.local_rank)
    code = train_on(build_mesh(config, device), config, launch, tokenizer, datasets, allowed, stop, afterwards)
    stop_distributed()
    return code


def train_on(mesh: Mesh, config: Config, launch: Launch, tokenizer: Tokenizer | None, datasets: Datasets,
             allowed: Collection[str] = (), listening: StopRequest | None = None,
             afterwards: ExitStack | None = None) -> int:
    """Train on a mesh that is there already; returns the exit code.

    Until the run has reported how it ended, a signal to stop only sets a flag: torchrun sends
    one as soon as a rank has died, and the others have yet to write why. From then on the process ignores it.
    `listening`: heard signals before, and goes on to; without it they are listened for from this call on.
    """
    early = listening is not None and listening.reason is not None
    with ExitStack() as own, nullcontext(listening) if listening is not None else StopRequest() as stop:
        stop.watch(Path(config.run_dir) / STOP_FILE if mesh.rank == 0 else None, StopRequest.torchrun())
        return _train_until(stop, early, mesh, config, launch, tokenizer, datasets, allowed, afterwards or own)


def _train_until(stop: StopRequest, early: bool, mesh: Mesh, config: Config, launch: Launch,
                 tokenizer: Tokenizer | None, datasets: Datasets, allowed: Collection[str],
                 afterwards: ExitStack) -> int:
    """As `train_on`, with what tells whether the run was asked to stop; `early`: it was before all ranks had come."""
    device = mesh.device
    try:
        folder = open_run_folder(config, mesh.group("world").pg)
    except CheckpointError as error:
        stop.restore()
        return refuse(error, 1, launch.local_rank)
    try:
        log = RankLog(folder.logs, mesh.rank, where=mesh.describe())
    except OSError as error:        # of this rank alone: the others learn of it by its end
        stop.restore()
        refused = CheckpointError(f"{mesh.describe()}: its log cannot be opened: {error}")
        first = folder.fail(0, str(refused))
        folder.close()
        return refuse(refused, 1) if first else 1
    afterwards.callback(log.close)
    if folder.stopped is not None:
        log.say(folder.stopped)
        folder.close()
        stop.ignore()
        return 0
    for note in folder.notes:
        log.say(note)
    training: Run | None = None
    watch: HangWatch | None = None

    def hung(reason: str) -> None:
        folder.fail(training.progress.step if training else 0, reason)
        log.alarm(reason)

    try:
        if _on_any_rank(early, mesh):
            asked = stop.reason or "a signal on another rank"
            folder.status("preempted", folder.step, asked)
            log.say(f"preempted by {asked} before the first step; nothing to save")
            return 0
        if mesh.world > 1:
            watch = HangWatch(mesh, folder.logs, config.run.timeout_seconds, hung)
        training = Run(config, build_state(config, mesh, int(config.model.vocab_size)), datasets, tokenizer,
                       log=log, stop_asked=stop.asked, peak_tflops=peak_tflops(config, device), watch=watch)
        outcome = _start_and_train(training, folder, allowed, afterwards)
        reason = (stop.reason or "a signal on another rank") if outcome == "preempted" else None
        folder.status(outcome, training.saved_step, reason)
        log.say(f"{outcome} after step {training.progress.step}{f' by {reason}' if reason else ''}, saved in "
                f"{checkpoints.step_path(folder.checkpoints, training.saved_step)}")
    except (CheckpointError, ConfigError, DataError, TrainingError) as error:
        gone = lost(watch.peers, error) if watch is not None else None
        first = folder.fail(training.progress.step if training else 0, f"{f'{gone}; ' if gone else ''}{error}")
        log.note(f"error: {error}")
        if launch.local_rank:
            stop.restore()      # of several ranks that say the same most wait: torchrun's signal may end them
        if isinstance(error, DataError):    # not alike on all ranks, as the others are: who meets it first says it
            return refuse(error, 1) if first else 1
        return refuse(error, 2 if isinstance(error, ConfigError) else 1, launch.local_rank)
    except KeyboardInterrupt:       # Ctrl-C reaches every rank, in the middle of anything: nothing to agree on
        first = folder.fail(training.progress.step if training else 0, "interrupted (SIGINT)")
        if first:
            say_error("interrupted")
        return 1
    except Exception as error:
        step, what = training.progress.step if training else 0, f"{type(error).__name__}: {error}"
        gone = lost(watch.peers, error) if watch is not None else None
        first = folder.fail(step, f"{f'{gone}; ' if gone else ''}{mesh.describe()}: {what}")
        log.note(f"failed in step {step + 1}\n{traceback.format_exc()}")
        if isinstance(error, OSError) and error.errno is not None:      # a disk that is full or gone, in one line
            stop.restore()
            return refuse(error, 1) if first else 1
        if not first:       # this rank failed because a peer did: that one's traceback is the one to show
            return 1
        if gone is not None:    # nor does this one's own say anything
            log.alarm(f"{gone}, so step {step + 1} failed here: {what} (traceback in {log.path})")
            return 1
        log.alarm(f"failed in step {step + 1}: {what} (traceback in {log.path})")
        raise
    finally:
        if watch is not None:
            watch.close()
        folder.close()
        stop.ignore()
    return 0


def _on_any_rank(flag: bool, mesh: Mesh) -> bool:
    """Whether the flag is set on any rank. Every rank calls it together."""
    mine = torch.tensor(float(flag), dtype=torch.float64, device=mesh.device)
    return bool(on_host(control_sum(mine, mesh, "world"), mesh))


def _start_and_train(training: Run, folder: RunFolder, allowed: Collection[str], afterwards: ExitStack) -> str:
    """Resume or start, then train; returns the outcome."""
    config = training.config
    if folder.resume_from is not None:
        for line in folder.changes(config, training.datasets, allowed):
            training.log.say(line)
        training.restore(folder.resume_from, verified=True)
        training.log.say(f"resumed from {folder.resume_from}, step {training.progress.step}, "
                         f"on mesh {training.state.mesh.words}")
        if training.progress.step >= int(config.train.steps or 0):
            training.log.say(f"nothing to train: that is train.steps={config.train.steps} or beyond it")
    elif config.checkpoint.init_from is not None:
        for line in start_from(training.state, config):
            training.log.say(line)
    folder.begin(training.progress.step, config)
    training.log.say(describe(config))
    training.metrics = Metrics(folder.path, config, training.log, start_step=training.progress.step)
    afterwards.callback(training.metrics.close)
    return training.train()


def peak_tflops(config: Config, device: torch.device) -> float | None:
    """What MFU is measured against: the config's number, the GPU's data sheet, or None (CPUs have no such figure)."""
    if config.logging.peak_tflops != "auto":
        return float(config.logging.peak_tflops)
    if device.type != "cuda":
        return None
    return known_peak(torch.cuda.get_device_name(device))
