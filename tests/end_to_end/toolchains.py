"""The toolchains of this machine that examples in other languages need."""

import shutil

TOOLCHAINS = [name for name in ("node", "go") if shutil.which(name)]
