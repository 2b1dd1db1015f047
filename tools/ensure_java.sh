#!/bin/sh
# Spark needs a Java 17 (or newer) runtime. Uses the one that is there; installs the system's package when run as root; else says what to install.
set -eu

has_java() {
    java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    command -v "$java" >/dev/null 2>&1 || return 1
    version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    [ -n "$version" ] && [ "$version" -ge 17 ]
}

has_java && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "tailrace: installing a Java 17 runtime for Spark (openjdk-17-jre-headless)"
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null
    has_java && exit 0
fi
echo "tailrace: Spark needs a Java 17 runtime; install openjdk-17-jre-headless (or your system's package of it) and run make again" >&2
exit 1
