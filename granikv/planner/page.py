def provenance_line(f): return "prov"
def write_page(*a): pass
