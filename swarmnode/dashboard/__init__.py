"""The live view of a node: snapshots in, lines of a terminal out.

    model.py history.py         successive NodeStatus → what is shown: rates, sparklines, figures per token    (pure)
    ui.py keys.py               what the person wants to see; keys → that                                      (pure)
    layout.py, panels           model + ui + size → lines of segments                                          (pure)
    cells.py look.py            text of others made harmless and cut to cells; styles and glyphs               (pure)
    screen.py                   lines → the bytes that change a terminal from the last ones                    (pure)
    terminal.py live.py         a terminal's modes; the thread that reads keys and draws                       (shell)
    attached.py still.py        a view of the node of this machine; a still as text, SVG or HTML               (shell)

A thread of its own draws, and never waits for the terminal: what serves others is not slowed by one that stands still.
"""
