from controller.moved import run_moved

if __name__ == "__main__":
    run_moved("serve", "serve")
