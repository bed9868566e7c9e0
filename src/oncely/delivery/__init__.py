"""Delivery semantics: in which order records and positions take effect, and where positions live.

| delivery | order | a crash between the two |
|---|---|---|
| exactly_once | together, in the sink's own transaction | shows nothing |
| at_least_once | records, then the position | writes records again |
| at_most_once | the position, then the records | loses records |
| none | the position on a timer, whatever becomes of the records | does either |

Exactly once is a sink as it is. The three others are :class:`oncely.delivery.apart.Apart`: the
two halves of a sink, written one after the other.
"""
