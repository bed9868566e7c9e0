"""A page on the ledgers of several pipelines, and the same for a terminal.

:mod:`oncely.web.model` reads, :mod:`oncely.web.page` renders HTML, :mod:`oncely.web.server` answers
requests; ``oncely top`` renders the same model.
"""
