"""x"""
def run(options): print(options); return 0
