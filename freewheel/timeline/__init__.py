"""The timeline of a run: spans of workers and learner, recorded, drawn and exported.

model     Timeline, Row, Span, and the compact form for pages       chrome    trace.json: written, and `read` back
terminal  drawn as text                                             page      drawn as a page (gantt.js, gantt.css)
track     a bounded ring of spans, written without locks            cells     many short spans as fewer longer ones
recording all tracks of a run, what is kept of them, and the files
"""
