from flow_grpo.cli import run

if __name__ == "__main__":
    run()
