/* Writes the name of every variable that the process asks for into $GETENV_LOG, a line each. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static char *find(const char *name)
{
    size_t length = strlen(name);
    for (char **each = environ; each && *each; each++)
        if (!strncmp(*each, name, length) && (*each)[length] == '=')
            return *each + length + 1;
    return NULL;
}

static void note(const char *name)
{
    static int log = -2;
    char line[512];
    if (log == -2) {
        const char *file = find("GETENV_LOG");
        log = file ? open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    }
    int length = snprintf(line, sizeof line, "%s\n", name);
    if (log >= 0 && length < (int) sizeof line && write(log, line, length) < 0)
        log = -1;
}

char *getenv(const char *name)
{
    note(name);
    return find(name);
}

char *secure_getenv(const char *name)
{
    note(name);
    return find(name);
}
