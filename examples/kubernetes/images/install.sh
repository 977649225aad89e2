#!/bin/sh
# Run in a stage of the Containerfile, as "install.sh LOCK": makes a virtual environment of what a lock has, and of
# our wheel, in /opt/gpu-pool. What it leaves is the same whenever it runs.
set -eu
lock=$1 folder=/opt/gpu-pool

# A user's own packages (pip install --user) are found, too.
python3 -m venv --system-site-packages "$folder"
PIP="$folder/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check"
$PIP --ignore-installed --require-hashes --only-binary :all: -r "/images/$lock.txt"
$PIP --no-deps --no-index /wheels/*.whl
"$folder/bin/python" -m pip check

# A module's compiled form has its source's time in it, unless it is told not to. One process, one order.
# A file that is not valid Python, such as a template in a package, is printed and passed over, as pip does.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
find "$folder" -name __pycache__ -type d -prune -exec rm -rf {} +
PYTHONHASHSEED=0 "$folder/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$packages" || true

# A software bill of materials.
PYTHONDONTWRITEBYTECODE=1 /tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
    --output-file "$folder/sbom.cdx.json" "$folder/bin/python"
