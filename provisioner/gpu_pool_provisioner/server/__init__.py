"""What a Jupyter server loads of this package: the slices of its kernels for its pages, and templates.

``extension`` is loaded with the server and is small, as is ``handlers``, which answers pages. The others
are imported once a page asks and there are kernels of ours to be started: ``slices`` keeps the state of all
kernels' slices, asks their pools in the name of all pages, and tells it to those that listen; ``offers`` says
what is free; ``model`` writes all that as JSON, and reads what pages send. ``openapi.yaml`` describes it.
"""
