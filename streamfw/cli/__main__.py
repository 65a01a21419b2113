"""``python -m streamfw.cli``: how `streamfw run --workers` starts its processes, whatever the PATH says."""

from . import main

main()
