#!/bin/busybox sh
# The first process of the guest. It builds the guest's file system out of this machine's own, runs one
# script in it and powers off. What the script writes goes to a layer in memory; what the host machine
# should get goes to /run/g35, the one folder that is really shared. `emulator/lab/machine.py` is the
# other end.
#
# On the kernel's command line: lab.probe (say that we booted, and power off: does this accelerator
# work?), lab.shell (an interactive shell on the console instead of the script).

/bin/busybox --install -s /bin
export PATH=/bin

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev

power_off() {
    sync
    echo o > /proc/sysrq-trigger
    while true; do sleep 1; done
}

# A failure here is the lab's own: the host machine shows the console, where these words are.
give_up() {
    echo "lab: $*"
    power_off
}

if grep -q lab.probe /proc/cmdline; then
    echo "lab: booted"
    power_off
fi

while read -r module; do
    insmod "/modules/$module" || give_up "insmod $module failed"
done < /modules/order

# The machine's root, which QEMU exports read-only, below a layer in memory that takes all writes.
# Nothing changes below while we run, so what was read once may be kept (cache=loose).
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose machine /lower ||
    give_up "cannot mount the machine's root"
mount -t tmpfs -o size=50% layer /layer
mkdir /layer/written /layer/work
mount -t overlay -o lowerdir=/lower,upperdir=/layer/written,workdir=/layer/work overlay /root ||
    give_up "cannot put a layer on the machine's root"

# The shared folder is not cached at all: the host machine reads along while we write.
mkdir /exchange /kept
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none exchange /exchange ||
    give_up "cannot mount the shared folder"

# A checkout below /tmp must not vanish under the guest's own /tmp.
checkout=$(cat /exchange/checkout)
hidden=
case "$checkout" in
/tmp/* | /var/tmp/*)
    hidden=yes
    mount --bind "/root$checkout" /kept || give_up "cannot keep the checkout in view"
    ;;
esac

mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs devtmpfs /root/dev
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts devpts /root/dev/pts
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run
mount -t tmpfs tmp /root/tmp
mount -t tmpfs tmp /root/var/tmp
mount -t configfs configfs /root/sys/kernel/config

if [ "$hidden" ]; then
    mkdir -p "/root$checkout"
    mount --bind /kept "/root$checkout" || give_up "cannot show the checkout"
fi
mkdir /root/run/modules
mount --bind /modules /root/run/modules || give_up "cannot show the modules"
mkdir /root/run/g35
mount --bind /exchange /root/run/g35 || give_up "cannot show the shared folder"

ip link set lo up
hostname g35-lab

# The kernel booted on one core (`kernel_line` in machine.py says why).
for switch in /sys/devices/system/cpu/cpu[0-9]*/online; do
    [ ! -e "$switch" ] || grep -q 1 "$switch" || echo 1 > "$switch" || give_up "$switch stays off"
done

if grep -q lab.shell /proc/cmdline; then
    setsid cttyhack chroot /root /bin/sh /run/g35/script
    power_off
fi

chroot /root /bin/sh /run/g35/script < /dev/null > /root/run/g35/output 2>&1
echo $? > /root/run/g35/status.unfinished
mv /root/run/g35/status.unfinished /root/run/g35/status
power_off
