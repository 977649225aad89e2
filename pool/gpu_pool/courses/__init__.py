"""Course files: what a teacher writes, one YAML file for each course.

::

    text      YAML as course files use it: text in, values and their lines out
    problems  what is wrong with a file, in words
    fields    the kinds of values, and how each is written
    hours     weeks of the year and hours of the week
    model     what a course file can say
    repeated  what two slices of a file say, and only one may
    reading   one file: from its bytes to a course
    folder    a folder of them, read again when they change
    editing   what of a file is its instructors' own, and what a change is
    writing   one file put in the place of another
    access    who may use a course, when, and what they may ask for
    groups    the system's groups of a user
    figures   how many fit, and what happens when all come at once
    words     a course in a sentence or two
    template  a course file to begin with

Only ``reading``, ``folder`` and ``writing`` touch files, and only ``groups`` asks the system.
"""

from gpu_pool.courses.access import check_offered, is_member, may_use, system_groups
from gpu_pool.courses.folder import CourseFolder, Courses
from gpu_pool.courses.model import CourseFile, json_schema
from gpu_pool.courses.problems import BadCourseFile, FileProblem
from gpu_pool.courses.reading import course_name, parse_course, read_bytes

__all__ = [
    "BadCourseFile",
    "CourseFile",
    "CourseFolder",
    "Courses",
    "FileProblem",
    "check_offered",
    "course_name",
    "is_member",
    "json_schema",
    "may_use",
    "parse_course",
    "read_bytes",
    "system_groups",
]
