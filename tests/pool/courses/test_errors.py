"""Every error of a course file: its line, its field, what was given and what is accepted."""

from __future__ import annotations

import pytest

from gpu_pool.courses import BadCourseFile, FileProblem, parse_course

#: Lines 1 to 4 of every file here.
GOOD = "title: A course\nslices:\n  - name: Small\n    request: 2%\n"


def problems(text: str | bytes) -> tuple[FileProblem, ...]:
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(BadCourseFile) as raised:
        parse_course("cs101.yaml", data)
    return raised.value.problems


@pytest.mark.parametrize(
    ("line", "field", "message", "remedy"),
    [
        ("wieght: 2", "", "there is no field 'wieght'", "Did you mean weight? Accepted: title, who, "),
        ("Time-Zone: UTC", "", "no field 'Time-Zone'", "Did you mean time_zone?"),
        ("who: {user: [ada]}", "who", "no field 'user'", "Did you mean users? Accepted: groups, users."),
        (
            "who: ada",
            "who",
            "is 'ada'",
            "a group of fields, each on a line of its own, indented: groups, users",
        ),
        ("who: {users: []}", "who, users", "is an empty list", "Name somebody, or remove the line"),
        ("instructors: []", "instructors", "is an empty list", "Name somebody, or remove the line"),
        ("who: {users: ada}", "who, users", "is 'ada'", "Accepted: a list"),
        ("who: {users: [[ada]]}", "who, users no. 1", "is a list", "Accepted: one value"),
        ("who: {users: ['']}", "who, users no. 1", "'' is not one line of text", "1 to 200 characters"),
        ("instructors: {ada: grace}", "instructors", "is a group of fields", "Accepted: a list"),
        ("any_up_to: lots", "any_up_to", "'lots' is not a GPU slice", "2% or 0.02"),
        (
            "per_user: {slices: 1.5}",
            "per_user, slices",
            "'1.5' is not a valid number",
            "a whole number from 0",
        ),
        ("per_user: {slices: -1}", "per_user, slices", "'-1' is not a valid number", "a whole number from 0"),
        ("quota: {share: 2GiB}", "quota, share", "'2GiB' is not a share", "50% or 4"),
        ("quota: {share: 50% model=T4}", "quota, share", "'50% model=T4' is not a share", "50% or 4"),
        ("quota: {share: 2%..50%}", "quota, share", "'2%..50%' is not a share", "50% or 4"),
        ("quota: {memory: 1GiB..4GiB}", "quota, memory", "'1GiB..4GiB' is not an amount of memory", "16GiB"),
        ("quota: {memory: 50%}", "quota, memory", "'50%' is not an amount of memory", "16GiB"),
        (
            "quota: {gpu_hours_per_week: .inf}",
            "quota, gpu_hours_per_week",
            "'.inf' is not a valid",
            "a number from 0",
        ),
        ("quota: 3", "quota", "is '3'", "slices, share, memory, gpu_hours_per_week, gpu_hours_per_term"),
        ("weight: no", "weight", "'no' is not a valid number", "a number from 0"),
        ("weight: -1", "weight", "'-1' is not a valid number", "a number from 0"),
        ("priority: -1001", "priority", "'-1001' is not a valid number", "a whole number from -1000"),
        ("weight: 1000000001", "weight", "'1000000001' is not", "a number from 0 to 1000000000"),
        ("priority: 1000001", "priority", "'1000001' is not", "from -1000 to 1000000"),
        ("per_user: {slices: 1000000001}", "per_user, slices", "is not a valid", "0 to 1000000000"),
        ("quota: {share: 1025}", "quota, share", "the number of GPUs is between 1 and 1024", "4 (whole"),
        ("quota: {memory: 999999999GiB}", "quota, memory", "is between 1MiB and 999999999MiB", "655MiB"),
        ("quota: {gpu_hours_per_term: 1e99}", "quota, gpu_hours_per_term", "is not a valid", "to 1000000000"),
        ("kubernetes: {cpu: 10001}", "kubernetes, cpu", "'10001' is not a valid", "up to 10000"),
        ("kubernetes: {start_within: 4000d}", "kubernetes, start_within", "longer than ten", "at most 3650d"),
        *(
            (f"{name}: 3000000d", name, "'3000000d' is longer than ten years", "Accepted: at most 3650d")
            for name in ("longest_lease", "idle_limit", "yield_after", "warn_before", "hibernate_after")
        ),
        ("longest_lease: soon", "longest_lease", "'soon' is not a duration", "15min, 2h"),
        ("longest_lease: 0s", "longest_lease", "is not longer than zero", "Leave it out for no limit"),
        ("hibernate_after: 0s", "hibernate_after", "is not longer than zero", "Leave it out for no limit"),
        ("idle_limit: 20:30", "idle_limit", "'20:30' is not a duration", "15min"),
        ("yield_after: nevr", "yield_after", "'nevr' is not a duration", "3d. Or never."),
        ("yield_after: 0s", "yield_after", "'0s' is not longer than zero", "such as 60s, or never."),
        (
            "yield_after: 20min\nidle_limit: 15min",
            "yield_after",
            "20min is longer than idle_limit (15min): by then the slice has been lent",
            "at most 15min, or never. Or a longer idle_limit.",
        ),
        ("when_idle: kep", "when_idle", "'kep' is not known", "Accepted: keep, end. Did you mean keep?"),
        ("warn_before: on", "warn_before", "'on' is not a duration", "15min"),
        ("keep_at_most: [2h]", "keep_at_most", "is a list", "Accepted: one value"),
        (
            "preload: [numpy, scikit-learn]",
            "preload no. 2",
            "'scikit-learn' is not the name of a Python module",
            "such as numpy or matplotlib.pyplot",
        ),
        ("preload: numpy torch", "preload", "'numpy torch' is not the name of a", "a name as import has it"),
        ("preload: {modules: [numpy]}", "preload", "is a group of fields", "Accepted: one value"),
        ("preload: [" + "numpy, " * 51 + "]", "preload", "there are 51", "Accepted: 1 to 50"),
        (
            "preload_with_server: true",
            "preload_with_server",
            "is true, and there is no preload",
            "preload: [numpy]",
        ),
        ("weeks: {from: 2026-10-12}", "weeks", "to is missing", "Add to: ..."),
        ("weeks: {from: 12.10.2026, to: 2026-12-18}", "weeks, from", "not a date", "such as 2026-10-12"),
        ("weeks: {from: 2026-02-30, to: 2026-12-18}", "weeks, from", "not a date", "such as 2026-10-12"),
        (
            "weeks: {from: 2026-12-18, to: 2026-12-17}",
            "weeks, to",
            "2026-12-17 is before 2026-12-18",
            "",
        ),
        ("hours: []", "hours", "there are 0", "Accepted: 1 to 50"),
        ("hours: [" + "Mon 10:00-12:00, " * 51 + "]", "hours", "there are 51", "Accepted: 1 to 50"),
        ("hours: Mon", "hours", "'Mon' is not a valid time of the week", "Mon 10:00-12:00"),
        ("hours: Mun 10:00-12:00", "hours", "'Mun' is not a day", "Mon 10:00-12:00"),
        ("hours: Mon 10:00-10:00", "hours", "it ends when it begins", "Mon 10:00-12:00"),
        ("hours: Mon 24:00-02:00", "hours", "a day ends at 24:00", "Mon 10:00-12:00"),
        ("hours: Mon 10:60-12:00", "hours", "10:60 is not a time of day", "Mon 10:00-12:00"),
        ("hours: Mon 10:00-24:01", "hours", "24:01 is not a time of day", "Mon 10:00-12:00"),
        ("hours: Mon-Wed-Fri 10:00-12:00", "hours", "is not a valid time of the week", "Mon 10:00-12:00"),
        ("time_zone: Europe/berlin", "time_zone", "not a time zone", "Did you mean Europe/Berlin?"),
        ("time_zone: Europe", "time_zone", "not a time zone", "an IANA name"),
        ("time_zone: ../../etc/passwd", "time_zone", "not a time zone", "an IANA name"),
        (
            "hours: Mon 10:00-12:00",
            "time_zone",
            "is missing: weeks and hours need one",
            "time_zone: Europe/Berlin",
        ),
        (
            "kubernetes: {image: 'No image'}",
            "kubernetes, image",
            "not the name of an image",
            "scipy-notebook",
        ),
        ("slurm: {time: '4:00:00'}", "slurm, time", "'4:00:00' is not a duration", "1h30min"),
        ("slurm: {mem: 8G}", "slurm, mem", "written in GiB or MiB", "1.5GiB"),
        ("slurm: {cpus_per_task: 0}", "slurm, cpus_per_task", "is 0", "leave it out for the default"),
        ("slurm: {queue: gpu}", "slurm", "no field 'queue'", "partition, account, qos, constraint"),
        ("kubernetes: {cpu: 0}", "kubernetes, cpu", "'0' is not a valid number of CPU cores", "2 or 0.5"),
        ("kubernetes: {memory: 4}", "kubernetes, memory", "'4' is not an amount of memory", "16GiB"),
        ("kubernetes: {home: 10GB}", "kubernetes, home", "memory is written in GiB or MiB", "1.5GiB"),
        ("kubernetes: {ram: 1GiB}", "kubernetes", "no field 'ram'", "image, cpu, memory, home, kernels"),
        ("quota:", "quota", "is empty", "Write a value, or remove the line"),
        ("title: Again", "", "'title' is already given on line 1", "Keep one of the two"),
        ("instructors: *all", "instructors", "references (* and &) are not supported", "in quotes"),
        ("instructors: &all [ada]", "instructors", "references (* and &) are not supported", "in quotes"),
        ("weight: !!python/object/apply:os.abort []", "weight", "os.abort' is not supported", "Leave it out"),
        ("? [a, b]\n: 2", "", "this is not a field", "NAME: VALUE"),
        ("who: {users: [[[[[[[a]]]]]]]}", "who, users", "too many levels", "example files"),
        ("\tweight: 2", "", "begins with a tab", "Indent with spaces"),
        ("instructors: [@ada]", "", "cannot begin with @ without quotes", "in quotes: '@ada'"),
        ("weight: 'two", "", "a quote is opened here and is never closed", "Close it"),
        ("--- \ntitle: Another", "", "a second document begins here", "one file each"),
        ("weight: \x01", "", "has U+0001, which is not seen", "Remove it: weight: \\x01"),
        (b"weight: \xff", "", "is not UTF-8", "Save it as UTF-8"),
    ],
)
def test_one_error_is_told_with_its_line(line: str | bytes, field: str, message: str, remedy: str) -> None:
    data = GOOD.encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    [found] = problems(data)
    assert (found.file, found.field) == ("cs101.yaml", field)
    # An open quote ends where the file does, and a missing field is told where its neighbours are.
    elsewhere = {"'two": 5, "is missing: weeks": 1}
    assert found.line == next((at for text, at in elsewhere.items() if text in f"{line!r} {found}"), 5)
    assert message in found.message
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("slices: [{name: Small, request: 2%}]", 1, "title is missing. Add title: ..."),
        ("title: A course", 1, "slices is missing"),
        ("title: A course\nslices: []", 2, "slices: there are 0. Accepted: 1 to 50"),
        ("title: A course\nslices: 2%", 2, "slices: is '2%'. Accepted: a list"),
        ("title: A course\nslices: [Small]", 2, "slices no. 1: is 'Small'. Accepted: a group of fields"),
        (GOOD + "  - name: Large\n", 5, "slices no. 2: request is missing"),
        (GOOD + "    default: maybe\n", 5, "slices no. 1, default: 'maybe' is neither true nor false"),
        (
            GOOD + "  - name: ' Small'\n    request: 3%\n",
            5,
            "slices no. 2, name: ' Small' is already the name of slices no. 1, on line 3. Give it another",
        ),
        (
            GOOD + "  - name: Same\n    request: 0.02\n",
            6,
            "slices no. 2, request: '0.02' is already the request of slices no. 1, on line 4. Keep one.",
        ),
        (
            GOOD + "    default: true\n  - name: Large\n    request: 3%\n    default: yes\n",
            8,
            "slices no. 2, default: slices no. 1 is already the default, on line 5. Keep one default: true.",
        ),
        ("- title", 1, "is a list. Accepted: a group of fields"),
        ("just words", 1, "is 'just words'. Accepted: a group of fields"),
        ("", None, "is empty"),
        ("\n \n", None, "is empty"),
        ("# nothing\n", None, "slices is missing"),
    ],
)
def test_the_parts_that_must_be_there(text: str, line: int | None, words: str) -> None:
    found = problems(text)[-1]
    assert found.line == line
    assert words in str(found)


def test_all_errors_are_told_at_once_by_line() -> None:
    found = problems(
        "titel: A course\nslices: [{name: S, request: 2GB, x: y}]\nweight: a\nweight: b\nhours: never"
    )
    assert [each.line for each in found] == [1, 1, 2, 2, 3, 4, 5]


def test_what_is_there_twice_is_told_each_time_and_beside_all_other_errors() -> None:
    again = "  - name: Small\n    request: 2%\n"
    broken = "  - name: Large\n    request: lots\n  - Odd\n"
    found = problems(GOOD + again + broken + again + "wieght: 2\n")
    assert [(each.line, each.field) for each in found] == [
        (5, "slices no. 2, name"),
        (6, "slices no. 2, request"),
        (8, "slices no. 3, request"),
        (9, "slices no. 4"),
        (10, "slices no. 5, name"),
        (11, "slices no. 5, request"),
        (12, ""),
    ]


def test_several_slices_may_say_that_they_are_not_the_default() -> None:
    more = "    default: no\n  - name: Large\n    request: 3%\n    default: false\n"
    course = parse_course("cs101.yaml", (GOOD + more).encode())
    assert course.default_slice.name == "Small"


def test_what_follows_from_an_error_is_not_told_as_another() -> None:
    [found] = problems("title: A course\nslices: *all\n")
    assert found.field == "slices"


def test_of_very_many_errors_some_are_told() -> None:
    with pytest.raises(BadCourseFile, match="x4'. .*There are more problems") as raised:
        parse_course("cs101.yaml", (GOOD + "".join(f"x{n}: 1\n" for n in range(101))).encode())
    assert len(raised.value.problems) == 100


def test_a_problem_reads_as_a_sentence() -> None:
    [found] = problems(GOOD + "weight: lots\n")
    assert str(found) == (
        "cs101.yaml, line 5: weight: 'lots' is not a valid number. "
        "Accepted: a number from 0 to 1000000000, such as 2 or 0.5."
    )
