#!/bin/sh
# Run in an image that is being built, as "install.sh LOCK USER GROUP": installs what a lock has, and our wheel;
# leaves a list of all of it (CycloneDX, a software bill of materials) in /usr/local/share/sbom; and makes the
# user 1000 of a group by number. What it leaves is the same whenever it runs.
set -eu
lock=$1 user=$2 group=$3
PIP="python3 -m pip install --no-cache-dir --no-compile --root-user-action ignore"

$PIP --require-hashes --only-binary :all: -r "/images/$lock.txt"
$PIP --no-deps --no-index /from-wheel/wheels/*.whl
python3 -m pip check

# A module's compiled form has its source's time in it, unless it is told not to. One process, one order.
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
find "$packages" -name __pycache__ -type d -prune -exec rm -rf {} +
PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash "$packages" || true

mkdir -p /usr/local/share/sbom
PYTHONDONTWRITEBYTECODE=1 /from-wheel/tools/bin/python /from-wheel/tools/bin/cyclonedx-py environment \
    --output-reproducible --output-format JSON \
    --output-file /usr/local/share/sbom/gpu-pool.cdx.json "$(command -v python3)"
rm -rf /tmp/* /root/.cache

# useradd would write down the day.
echo "$user:x:1000:$group::/home/$user:/bin/bash" >>/etc/passwd
grep -q "^[^:]*:[^:]*:$group:" /etc/group || echo "$user:x:$group:" >>/etc/group
cp -r /etc/skel "/home/$user"
chown -R "1000:$group" "/home/$user"
