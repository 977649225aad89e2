"""Puts kernels to disk and lets them go on, for any user. To be installed as root's own file, with sudoers.

    check         say why no kernel can sleep here, in a sentence; "" where one can
    launch        run a kernel that may sleep; say its ID, and its pid
    dump ID       write it to disk, and end it once its image is whole
    restore ID    let it go on from there
    note ID       keep something beside it that the caller is told again by list
    remove ID     remove its image
    list          say what kernels of the caller's there are; to root, all

Nothing else is accepted. The first line of its standard input is a JSON object, with what a verb needs
besides (launch: argv, env, cwd, umask; note: note; dump: note, which may be left out). One line of JSON is
printed: {"ok": true, …} or {"ok": false, "error": "why"}. launch and restore stay until the kernel has ended.
The kernel ends when their standard input does; a dump is given up then.

CRIU never runs with more rights than the user has who calls, but for CAP_CHECKPOINT_RESTORE and
CAP_SYS_PTRACE, in a pid namespace in which there is nobody else. So what it opens, creates or removes by a
name, the user could. The program needs the standard library alone, uses no shell, and takes no path, no id
and no setting from a user. Root alone may say other settings, in the first line: "settings".

All that is imported is imported before anything of this is done: later it would be looked for in mounts that
are the user's.
"""
