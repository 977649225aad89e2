"""What a Jupyter server loads of this package: the slices of its kernels for its pages, and templates.

``extension`` is loaded with the server and is small, as is ``handlers``, which answers pages. The others
are imported once a page asks and there are kernels of ours to be started: ``slices`` keeps the state of all
kernels' slices and tells it to the pages that listen; ``pool_watch`` asks a pool in the name of all of them;
``offers`` says what is free; ``model`` writes all that as JSON. ``openapi.yaml`` describes it.
"""
