"""Chooses decisions: systems as presets, candidate layouts, alpha, number of subsequences, lower bounds, the search.

    space                 the candidates of a question: layouts with policies
    bounded_candidates    a candidate's lower bounds, from those of plans (``lower_bounds``)
    plays, evaluation     plans played once each, and a candidate's outcome from them
    examination           both for one candidate, here or in another process (``ahead``, ``processes``)
    ranking, findings     the best so far, and what is found out about candidates
    search                the order of it all, and what is pruned

Explanations of the answer are in ``reasons``, rendering in ``views``.
"""
