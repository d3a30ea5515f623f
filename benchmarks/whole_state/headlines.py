def headlines(): return ""
