"""What SGLang imports in each of several tokenizer processes, in which it loads no plug-ins itself."""

from sglang.srt.plugins import load_plugins

__path__: list[str] = []  # where SGLang looks for processors of other packages

load_plugins()
