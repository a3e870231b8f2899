"""`g35`: the verbs, and how errors reach the person who typed one.

A verb is a row of `VERBS`; its module is imported only when that verb is asked for. To add one, write
agent/cli/<verb>_verb.py with a function or a `typer.Typer`, and add the row (docs/contributing.md).

Exit codes: 0 it worked, 1 it did not, 2 the arguments are wrong, 130 Ctrl-C.
"""

import sys

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

try:
    import difflib
    import errno
    import gc
    import importlib
    import importlib.util
    import os
    import re
    import signal
    import traceback
    from collections.abc import Sequence
    from dataclasses import dataclass
    from typing import Any

    import typer
    from typer.core import TyperGroup

    from agent.cli.standard_output import flush_output, outlive_readers
    from agent.errors import Fault, G35Error, UserError, did_you_mean
    from agent.host_os.private_memory import keep_memory_private
    from nvmeof.linux_limits import MORE_THREADS, Need, check_limits, refusal, tell_refusals
    from nvmeof.thread_names import show_thread_names
except KeyboardInterrupt:
    # These take a while, and who presses Ctrl-C meanwhile need not see where we were.
    sys.exit(EXIT_INTERRUPTED)
except (ImportError, MemoryError, OSError) as failure:
    why = str(failure) or "no memory"
    sys.exit(f"error: g35 cannot be loaded: {why}\nhint: is there a limit (ulimit -v, ulimit -n)?")


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb is written, and its line in `g35 --help`."""

    module: str
    attribute: str
    summary: str


VERBS: dict[str, Verb] = {
    "up": Verb("agent.cli.up.up_verb", "up", "Start enclosures, pool, agent and mount on this machine."),
    "down": Verb("agent.cli.up.down_verb", "down", "End the pool that `g35 up` started."),
    "status": Verb(
        "agent.cli.status_verb", "status", "The agent's state: enclosures, hits, volumes and tenants."
    ),
    "top": Verb("agent.cli.status_verb", "top", "The same as status, live."),
    "agent": Verb("agent.cli.agent_verb", "agent", "The DPU program: serve a pool, in the foreground."),
    "mount": Verb(
        "agent.cli.mount_verb", "mount", "Start the agent in the background; returns once it is mounted."
    ),
    "unmount": Verb("agent.cli.mount_verb", "unmount", "End the agent behind a mount."),
    "pool": Verb("agent.cli.pool_verb", "app", "The pool: format, show, add, settle, scrub, quarantine."),
    "tenant": Verb("agent.cli.tenant_verb", "app", "The tenants of a pool: list, add, set, rotate, erase."),
    "spill": Verb("agent.cli.spill_verb", "app", "What the pool has in G4: status, scrub, drop."),
    "enclosure": Verb(
        "agent.cli.enclosure_verb", "app", "Configure an enclosure (SPDK, nvmet, jbof) from a file."
    ),
    "doctor": Verb("agent.cli.doctor_verb", "doctor", "Check this machine for what g35 needs."),
    "key": Verb(
        "agent.cli.key_verb",
        "app",
        "Make or check the root key; secrets of enclosures, S3, routers.",
    ),
    "config": Verb("agent.cli.config_verb", "app", "Check a configuration, list all its keys, print a unit."),
    "run": Verb("agent.cli.run_demo", "run", "Start a pool, replay a trace through it, end it."),
    "replay": Verb(
        "agent.cli.replay_verb", "replay", "Play a KV-cache trace through a mount, verifying bytes."
    ),
    "claims": Verb(
        "agent.cli.claims_verb", "claims", "Which claims of a G3.5 tier hold, for a model, a GPU and a pod."
    ),
    "sim": Verb("agent.cli.sim_verb", "sim", "Simulate a pod of GPUs and enclosures in virtual time."),
    "bench": Verb("agent.bench.bench_verb", "bench", "Measure speeds, each beside its floor, in one run."),
    "trace": Verb("agent.cli.trace_verb", "app", "Make a trace for `g35 replay`."),
}

PASSED_ON: dict[str, tuple[str, str]] = {
    "jbof": ("emulator.jbof", "An enclosure: drives served over NVMe-oF."),
    "lab": ("emulator.lab", "A kernel in QEMU that tests our NVMe-oF."),
    "host": ("emulator.lab.host_main", "The GPU host: a kernel in QEMU that mounts the agent's device."),
}
"""Verbs that are programs of the emulator. The agent never imports it; it becomes it."""


WITH_KEYS = frozenset({"agent", "key", "pool", "spill", "tenant"})
"""Verbs that have the root key in their memory, some of them for minutes."""

_CURES = {
    errno.EACCES: "run this as a user who may, or change the permissions",
    errno.EPERM: "run this as a user who may, or change the permissions",
    errno.ENOENT: "name one that is there",
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EROFS: "name another place",
    errno.EMFILE: "raise the limit (ulimit -n, LimitNOFILE= of a unit)",
    errno.ENOTCONN: "start the agent there again, or umount -l",
}
"""What to do about an error of Linux that no verb has words for."""

LISTED_MAX = 12
"""Verbs of a group that are told to the user of an unknown one; a longer list is for `--help`."""

VERB_NEED = Need("g35", memory_bytes=192 << 20, threads=2, files=24)
"""Of any verb, for its libraries; what an agent takes while it serves is said in agent_verb.py."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code, except where typer has left by itself."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None:
            outlive_readers()
            tell_refusals()
            show_thread_names()
            if words and words[0] in VERBS:
                check_limits(VERB_NEED)
            # numpy brings it along, with a thread for each core; nothing here multiplies matrices.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if words and words[0] in PASSED_ON:
            _become(words[0], words[1:])
        if arguments is None and words and words[0] in WITH_KEYS:
            keep_memory_private()
        # All that an import makes stays: to look for garbage amid imports is a tenth of a verb's start.
        gc.disable()
        try:
            application = _application(words[0] if words else "")
        finally:
            gc.enable()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # agent/__init__.py, while we were loading
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            application(args=words, prog_name="g35")
        finally:
            if arguments is None:
                flush_output()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except G35Error as error:
        return _explain(error)
    except Exception as error:
        found = refusal(error)
        if isinstance(error, BlockingIOError):  # of fork(2)
            found = "Linux refuses another process", MORE_THREADS
        if found is not None:
            return _explain(G35Error(*found))
        if not isinstance(error, OSError):
            return _explain(_bug(error))
        where = f"{error.filename}: " if error.filename else ""
        cure = _CURES.get(error.errno or 0, "G35_DEBUG=1 shows where that came from")
        return _explain(G35Error(f"{where}{error.strerror or error}", cure))
    return 0


def _bug(error: Exception) -> G35Error:
    return G35Error(
        f"{type(error).__name__}: {error}",
        "this is a bug of g35; run it again with G35_DEBUG=1 and report what it prints",
        fault=Fault.BUG,
    )


class _Words(TyperGroup):
    """The verbs of a group. A mistyped one is answered by the nearest; where none is near, by all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A verb in another case is near as well; typer looks for those that are spelt alike."""
        word = args[0] if args else ""
        if word not in self.commands and not word.startswith("-"):
            if word.lower() in self.commands:
                ctx.fail(f"No such command {word!r}. Did you mean {word.lower()!r}?")
            if len(self.commands) <= LISTED_MAX and not difflib.get_close_matches(word, self.commands):
                ctx.fail(f"No such command {word!r}. {ctx.command_path} has: {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)


class _Verbs(_Words):
    """A mistyped word among the values of an option is answered by the nearest known one, as verbs are."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as wrong:
            wrong.message = wrong.message.removeprefix("Value error, ").removeprefix("Input ")
            typed, is_choice, known = wrong.message.partition(" is not one of ")
            if is_choice:
                near = did_you_mean(typed.strip("'"), re.findall("'([^']*)'", known))
                wrong.message = f"{wrong.message.removesuffix('.')}{near}."
            raise


def _application(chosen: str) -> typer.Typer:
    """The chosen verb in full, and the lines of the others for the help."""
    application = typer.Typer(
        cls=_Verbs,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    application.callback(help="An open G3.5 tier: pod-level flash for the KV cache of LLM inference.")(_group)
    for name, verb in VERBS.items():
        if name != chosen:
            application.command(name, help=verb.summary)(_never_called)
            continue
        target = getattr(importlib.import_module(verb.module), verb.attribute)
        if isinstance(target, typer.Typer):
            application.add_typer(target, name=name, help=verb.summary, cls=_Words)
        else:
            application.command(name)(target)
    for name, (_module, summary) in PASSED_ON.items():
        application.command(name, help=summary)(_never_called)
    return application


def _group() -> None:
    """A callback keeps typer from dropping the verb's name if there ever is only one."""


def _never_called() -> None:
    raise AssertionError("main() builds the chosen verb in full")


def _become(name: str, words: list[str]) -> None:
    module, _summary = PASSED_ON[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UserError(
            f"`g35 {name}` needs the emulator, which is not installed here",
            "run it from a checkout of the project, after `make setup`",
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *words])


def _explain(error: G35Error) -> int:
    if os.environ.get("G35_DEBUG") == "1":
        traceback.print_exc()
    print(f"error: {error}", file=sys.stderr)
    if error.advice:
        print(f"hint: {error.advice}", file=sys.stderr)
    return EXIT_FAILED
