"""Every subcommand of `shmstore`."""

from shmstore.cli.command import Command
from shmstore.cli.commands.bench import COMMAND as BENCH
from shmstore.cli.commands.dump import COMMAND as DUMP
from shmstore.cli.commands.gc import COMMAND as GC
from shmstore.cli.commands.ls import COMMAND as LS
from shmstore.cli.commands.relay import COMMAND as RELAY
from shmstore.cli.commands.tier import COMMAND as TIER
from shmstore.cli.commands.top import COMMAND as TOP
from shmstore.cli.commands.verify import COMMAND as VERIFY

COMMANDS: tuple[Command, ...] = (LS, DUMP, TOP, VERIFY, GC, BENCH, RELAY, TIER)
