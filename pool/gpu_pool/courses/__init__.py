"""Course files: what a teacher writes, one YAML file for each course.

::

    text       YAML as course files use it: text in, values and their lines out; what is wrong with a file
    fields     the kinds of values, and how each is written
    hours      weeks of the year and hours of the week
    model      what a course file can say
    reading    one file: from its bytes to a course; its times in words
    folder     a folder of them, read again when they change; one file put in the place of another
    mistakes   what is no YAML, in the words of who wrote it
    editing    a course file to begin with, what of it is its instructors' own, and what a change is
    access     who may use a course, when, and what they may ask for; the system's groups of a user
    admission  the course files in front of a pool: asked before anything is granted
    arithmetic how many slices fit or are free, and what happens when all come at once

Only ``reading`` and ``folder`` touch files.
"""

from gpu_pool.courses.access import check_offered, is_member, may_use, system_groups
from gpu_pool.courses.folder import SHARED_FOLDERS, CourseFolder, Courses
from gpu_pool.courses.model import CourseFile, json_schema
from gpu_pool.courses.reading import check_course, course_name, parse_course, read_bytes, read_course
from gpu_pool.courses.text import BadCourseFile, FileProblem

__all__ = [
    "SHARED_FOLDERS",
    "BadCourseFile",
    "CourseFile",
    "CourseFolder",
    "Courses",
    "FileProblem",
    "check_course",
    "check_offered",
    "course_name",
    "is_member",
    "json_schema",
    "may_use",
    "parse_course",
    "read_bytes",
    "read_course",
    "system_groups",
]
