"""The timeline of a run: spans of workers and learner, recorded, drawn and exported.

model     Timeline, Row, Span, and the compact form for pages       chrome    writes and reads trace.json
terminal  draws it as text                                          page      draws it as a page (gantt.js, gantt.css)
track     a bounded ring of spans, written without locks            cells     merges many short spans into fewer
recording all tracks of a run, the spans that are kept, and the files
"""
