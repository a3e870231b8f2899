/* Golden vectors of the FUSE protocol, by an independent hand: the C compiler and <linux/fuse.h>.
 *
 *     cc -o make_fuse_abi make_fuse_abi.c && ./make_fuse_abi > fuse_abi.json
 *
 * For each structure two strings: `plain`, in which whatever we skip is zero, and `noisy`, in which it is
 * not; and the fields that we do name, in the order of our records, each non-zero and unlike its neighbours.
 */
#include <linux/fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int first = 1;

static void hex(const void *at, size_t size)
{
	for (size_t i = 0; i < size; i++)
		printf("%02x", ((const unsigned char *)at)[i]);
}

static void emit(const char *name, const void *plain, const void *noisy, size_t size, const char *fields)
{
	printf("%s\n  \"%s\": {\"fields\": [%s],\n    \"plain\": \"", first ? "{" : ",", name, fields);
	hex(plain, size);
	printf("\",\n    \"noisy\": \"");
	hex(noisy, size);
	printf("\"}");
	first = 0;
}

#define BEGIN(type) { struct type r[2]; char fields[1024] = ""; char one[64]; \
	memset(&r[0], 0, sizeof r[0]); memset(&r[1], 0xa5, sizeof r[1]);
#define SET(field, value) r[0].field = r[1].field = (value); \
	snprintf(one, sizeof one, "%s%lld", fields[0] ? ", " : "", (long long)(value)); strcat(fields, one);
#define END(name) emit(name, &r[0], &r[1], sizeof r[0], fields); }

#define ATTR(at) \
	SET(at ino, 0x0102030405060708) SET(at size, 0x1112131415161718) SET(at blocks, 0x2122232425262728) \
	SET(at atime, 0x3132333435363738) SET(at mtime, -2) SET(at ctime, 0x5152535455565758) \
	SET(at atimensec, 0x61626364) SET(at mtimensec, 0x65666768) SET(at ctimensec, 0x696a6b6c) \
	SET(at mode, 0x7172) SET(at nlink, 0x75767778) SET(at uid, 0x797a7b7c) SET(at gid, 0x7d7e7f01) \
	SET(at rdev, 0x02030405) SET(at blksize, 0x06070809) SET(at flags, 0x0a0b0c0d)

int main(void)
{
	BEGIN(fuse_in_header) SET(len, 0x01020304) SET(opcode, 0x05060708) SET(unique, 0x1112131415161718)
	SET(nodeid, 0x2122232425262728) SET(uid, 0x31323334) SET(gid, 0x35363738) SET(pid, 0x393a3b3c)
	SET(total_extlen, 0x4142) END("InHeader")
	BEGIN(fuse_out_header) SET(len, 0x01020304) SET(error, -38) SET(unique, 0x1112131415161718) END("OutHeader")
	BEGIN(fuse_init_out) SET(major, 7) SET(minor, 39) SET(max_readahead, 0x01020304) SET(flags, 0x05060708)
	SET(max_background, 0x1112) SET(congestion_threshold, 0x1314) SET(max_write, 0x15161718)
	SET(time_gran, 0x191a1b1c) SET(max_pages, 0x1d1e) SET(map_alignment, 0x1f20) SET(flags2, 0x21222324)
	END("InitOut")
	BEGIN(fuse_forget_in) SET(nlookup, 0x0102030405060708) END("ForgetIn")
	BEGIN(fuse_batch_forget_in) SET(count, 0x01020304) END("BatchForgetIn")
	BEGIN(fuse_forget_one) SET(nodeid, 0x0102030405060708) SET(nlookup, 0x1112131415161718) END("ForgetOne")
	BEGIN(fuse_getattr_in) SET(getattr_flags, 0x01020304) SET(fh, 0x1112131415161718) END("GetattrIn")
	BEGIN(fuse_setattr_in) SET(valid, 0x01020304) SET(fh, 0x1112131415161718) SET(size, 0x2122232425262728)
	SET(atime, 0x3132333435363738) SET(mtime, -3) SET(ctime, 0x5152535455565758)
	SET(atimensec, 0x61626364) SET(mtimensec, 0x65666768) SET(ctimensec, 0x696a6b6c) SET(mode, 0x71727374)
	SET(uid, 0x75767778) SET(gid, 0x797a7b7c) END("SetattrIn")
	BEGIN(fuse_mknod_in) SET(mode, 0x01020304) SET(rdev, 0x05060708) SET(umask, 0x090a0b0c) END("MknodIn")
	BEGIN(fuse_mkdir_in) SET(mode, 0x01020304) SET(umask, 0x05060708) END("MkdirIn")
	BEGIN(fuse_rename_in) SET(newdir, 0x0102030405060708) END("RenameIn")
	BEGIN(fuse_rename2_in) SET(newdir, 0x0102030405060708) SET(flags, 0x11121314) END("Rename2In")
	BEGIN(fuse_link_in) SET(oldnodeid, 0x0102030405060708) END("LinkIn")
	BEGIN(fuse_open_in) SET(flags, 0x01020304) SET(open_flags, 0x05060708) END("OpenIn")
	BEGIN(fuse_create_in) SET(flags, 0x01020304) SET(mode, 0x05060708) SET(umask, 0x090a0b0c)
	SET(open_flags, 0x0d0e0f01) END("CreateIn")
	BEGIN(fuse_read_in) SET(fh, 0x0102030405060708) SET(offset, 0x1112131415161718) SET(size, 0x21222324)
	END("ReadIn")
	BEGIN(fuse_write_in) SET(fh, 0x0102030405060708) SET(offset, 0x1112131415161718) SET(size, 0x21222324)
	SET(write_flags, 0x25262728) SET(lock_owner, 0x292a2b2c2d2e2f30) END("WriteIn")
	BEGIN(fuse_release_in) SET(fh, 0x0102030405060708) SET(flags, 0x11121314) SET(release_flags, 0x15161718)
	END("ReleaseIn")
	BEGIN(fuse_flush_in) SET(fh, 0x0102030405060708) SET(lock_owner, 0x1112131415161718) END("FlushIn")
	BEGIN(fuse_fsync_in) SET(fh, 0x0102030405060708) SET(fsync_flags, 0x11121314) END("FsyncIn")
	BEGIN(fuse_fallocate_in) SET(fh, 0x0102030405060708) SET(offset, 0x1112131415161718)
	SET(length, 0x2122232425262728) SET(mode, 0x31323334) END("FallocateIn")
	BEGIN(fuse_ioctl_in) SET(fh, 0x0102030405060708) SET(flags, 0x11121314) SET(cmd, 0x21222324)
	SET(arg, 0x3132333435363738) SET(in_size, 0x41424344) SET(out_size, 0x51525354) END("IoctlIn")
	BEGIN(fuse_ioctl_out) SET(result, -38) SET(flags, 0x11121314) END("IoctlOut")
	BEGIN(fuse_getxattr_in) SET(size, 0x01020304) END("GetxattrIn")
	BEGIN(fuse_attr) ATTR() END("AttrOfFile")
	BEGIN(fuse_attr_out) SET(attr_valid, 0x1112131415161718) SET(attr_valid_nsec, 0x191a1b1c) ATTR(attr.)
	END("AttrOut")
	BEGIN(fuse_entry_out) SET(nodeid, 0x0102030405060709) SET(generation, 0x1112131415161718)
	SET(entry_valid, 0x2122232425262728) SET(attr_valid, 0x3132333435363738)
	SET(entry_valid_nsec, 0x41424344) SET(attr_valid_nsec, 0x45464748) ATTR(attr.) END("EntryOut")
	BEGIN(fuse_open_out) SET(fh, 0x0102030405060708) SET(open_flags, 0x11121314) END("OpenOut")
	BEGIN(fuse_write_out) SET(size, 0x01020304) END("WriteOut")
	BEGIN(fuse_statfs_out) SET(st.blocks, 0x0102030405060708) SET(st.bfree, 0x1112131415161718)
	SET(st.bavail, 0x2122232425262728) SET(st.files, 0x3132333435363738) SET(st.ffree, 0x4142434445464748)
	SET(st.bsize, 0x51525354) SET(st.namelen, 0x55565758) SET(st.frsize, 0x595a5b5c) END("StatfsOut")
	BEGIN(fuse_getxattr_out) SET(size, 0x01020304) END("GetxattrOut")
	BEGIN(fuse_dirent) SET(ino, 0x0102030405060708) SET(off, 0x1112131415161718) SET(namelen, 0x21222324)
	SET(type, 0x25262728) END("DirentHead")
	printf("\n}\n");
	return 0;
}
