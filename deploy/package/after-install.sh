#!/bin/sh
# Debian calls `postinst configure [OLD-VERSION]`, rpm `%post 1` (new) or `%post 2` (upgrade).
set -e
case "$1" in
    configure | 1 | 2) ;;
    *) exit 0 ;;
esac
systemd-sysusers tailrace.conf
systemd-tmpfiles --create tailrace.conf
# Byte code, which the service may not write itself: a start takes a quarter of the time with it.
/opt/tailrace/bin/python3 -I -m compileall -q -j 0 /opt/tailrace/lib || echo "tailrace: some modules were not compiled"
if [ "$1" = configure ]; then
    deb-systemd-helper unmask tailrace.service >/dev/null
    if deb-systemd-helper --quiet was-enabled tailrace.service; then
        deb-systemd-helper enable tailrace.service >/dev/null
    else
        deb-systemd-helper update-state tailrace.service >/dev/null
    fi
elif [ "$1" = 1 ]; then
    systemctl preset tailrace.service >/dev/null 2>&1 || true
fi
# In a chroot, and in an image that is being built, nothing is started.
[ -d /run/systemd/system ] || exit 0
# A container may not set what its host decides.
sysctl --quiet --load /usr/lib/sysctl.d/60-tailrace.conf 2>/dev/null ||
    echo "tailrace: the kernel settings of /usr/lib/sysctl.d/60-tailrace.conf take effect at the next boot"
systemctl daemon-reload
if [ "$1" = configure ]; then
    deb-systemd-invoke start tailrace.service
elif systemctl --quiet is-enabled tailrace.service; then
    systemctl start tailrace.service
fi
# Instances that were stopped for the upgrade.
for link in /etc/systemd/system/*.wants/tailrace@*.service; do
    [ ! -e "$link" ] || systemctl start "${link##*/}"
done
