"""The one entry of every script: the words on a command line become one checked plain dataclass, or one sentence.

config = parse_config("train", __doc__)     composes and checks; ends the process with code 2 where a word is wrong
leave(run(main, config))             runs; a refusal from inside becomes a sentence as well
"""

import argparse
import atexit
import errno
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.errors import TrainingFailed, UserError, is_out_of_memory
from common.run_dir import EXIT_CODES
from configs.composition import CONFIGS, choices, compose_config, escape_interpolation, is_hydras, is_launcher
from configs.error_messages import explain
from configs.schema import SCRIPTS

# What goes wrong with files on a user's machine, and is no bug.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
USER_ERRNOS = FULL | {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
FLAGS = """flags:
  --help            this page
  --cfg job         print the composed config and stop
  --config-dir DIR  look for YAML files of your own in DIR as well (DIR/experiment/mine.yaml -> experiment=mine)
"""
MULTIRUN = """\
  -m                a run for each combination of values, as in -m attention=sdpa,flash seed=1,2,3, and a comparison
                    in runs/sweeps/NAME; hydra/launcher=NAME and hydra.launcher.KEY=VALUE say where they run
"""


def parse_config(script: str, doc: str, argv: list[str] | None = None) -> Any:
    """The checked config of `script` from a command line, as plain dataclasses. Ends the process where it is wrong."""
    sys.excepthook = _interrupted
    try:
        flags, overrides = _parse(script, argv)
        if flags.help:
            print(_help_page(script, doc))
            raise SystemExit(0)
        if flags.multirun:
            if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
                raise UserError("-m starts its own processes, each a run; leave out torchrun, or leave out -m")
            from configs.multirun import run_multirun

            raise SystemExit(run_main(run_multirun, flags, overrides))
        composed = compose_config(script, overrides, flags.config_dir)
        config = OmegaConf.to_object(composed)
        if flags.cfg:
            print(OmegaConf.to_yaml(composed, resolve=True), end="")
            raise SystemExit(0)
        config.check()
        return config
    except UserError as error:
        raise SystemExit(report_error(error, 2)) from None
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise SystemExit(report_error(_explained(error, overrides, script), 2)) from None
    except OSError as error:  # of the files that the words name
        if error.errno not in USER_ERRNOS:
            raise
        raise SystemExit(report_error(_of_a_file(error), 2)) from None


def config_from_python(script: str, **settings: Any) -> Any:
    """The checked config of `script` with `settings` in place of its own, for Python. Raises UserError."""
    groups = {key: value for key, value in settings.items() if choices(key)}
    overrides = [f"{key}={value}" for key, value in groups.items()]
    try:
        composed = compose_config(script, overrides, None)
        own = {key: value for key, value in settings.items() if key not in groups}
        for key, value in own.items():
            texts = value if isinstance(value, list | tuple) else [value]
            texts = [escape_interpolation(text) if isinstance(text, str) else text for text in texts]
            OmegaConf.update(composed, key, texts if isinstance(value, list | tuple) else texts[0])
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        given = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
        raise UserError(_explained(error, given, script)) from None
    config.check()
    return config


def _explained(error: Exception, overrides: list[str], script: str) -> str:
    return explain(
        error, overrides, SCRIPTS[script], lambda: OmegaConf.to_container(compose_config(script, [], None))
    )  # fmt: skip


def run_main(main: Callable[..., int], *config: Any) -> int:
    """main(config) -> the process's exit code. What a user can mend is told in one sentence, without a traceback."""
    try:
        return main(*config)
    except UserError as error:
        return report_error(error, 2)
    except TrainingFailed as error:
        return report_error(error, 1)
    except KeyboardInterrupt as error:
        return report_error(str(error) or "interrupted", EXIT_CODES["interrupted"])
    except BrokenPipeError:  # nobody reads any more, as in `python sample.py | head`
        return 1
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        return report_error(_of_a_file(error), 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return report_error("out of memory; set a smaller train.micro_batch_size, model.block_size or model", 1)


def _of_a_file(error: OSError) -> str:
    mend = "make room, or set another folder or name" if error.errno in FULL else "set another file, folder or name"
    return f"{error.filename or 'writing'}: {error.strerror}; {mend}"


def _interrupted(kind: type, error: BaseException, traceback: Any) -> None:
    """Ctrl-C while libraries are imported is told as ever, also where Python turned it into another error."""
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        os._exit(report_error("interrupted", EXIT_CODES["interrupted"]))
    sys.__excepthook__(kind, error, traceback)


def exit_fast(code: int) -> None:
    """End the process without taking torch apart again, on which Python would spend most of a second.

    What libraries have to do at the end they do, as removing temporary folders.
    """
    for child in multiprocessing.active_children():  # for which they would wait, while it may wait for this process
        child.kill()
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def report_error(message: object, code: int) -> int:
    if int(os.environ.get("RANK", "0")) > 0:
        if code == EXIT_CODES["interrupted"]:
            return code
        time.sleep(3)  # what is wrong in every process is said once, since rank 0's end takes the others with it
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return code


def _parse(script: str, argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the key=value overrides. Raises UserError for anything else."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    if script == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
    parser.set_defaults(multirun=False)
    try:
        flags, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    for word in words:
        key = word.split("=", 1)[0]
        if word.startswith("-"):
            raise UserError(f"{word} is not a flag of this command; see --help")
        if word.startswith(("+", "~")):
            raise UserError(f"{word}: every key exists already and none can go; set {key.lstrip('+~')}=VALUE instead")
        if is_hydras(key) and not (flags.multirun and is_launcher(word)):
            but = ", but for hydra/launcher with -m" if script == "train" else ""
            raise UserError(f"{key} belongs to Hydra's own machinery, which is not used here{but}; leave it out")
        if "=" not in word:
            raise UserError(f"{word!r} is not of the form key=value; see --help")
        if choices(key) and key != "experiment" and word.split("=", 1)[1] in ("", "null"):
            raise UserError(f"{word} leaves {key} without a choice; set {key}={' or '.join(choices(key))}")
    return flags, words


def _help_page(script: str, doc: str) -> str:
    groups = {path.name: choices(path.name) for path in sorted(CONFIGS.iterdir()) if path.is_dir()}
    used = (CONFIGS / f"{script}.yaml").read_text()
    lines = [f"  {group + '=':14}{' | '.join(names)}" for group, names in groups.items()
             if names and re.search(rf"^  - {group}:", used, re.MULTILINE)]  # fmt: skip
    flags = FLAGS + (MULTIRUN if script == "train" else "")
    return "\n".join([doc.strip(), "", *(["groups, a choice of each:", *lines, ""] if lines else []), flags.rstrip()])
