package e2e

import (
	"strings"
	"testing"
)

// pythonStack is a stack whose sandboxes have the base image's Python.
func pythonStack(t *testing.T) *stack {
	t.Helper()
	return start(t, options{runEnv: onContainers(t)})
}

const calculator = `"""
title: Calculator
author: e2e
version: 0.1
"""
from pydantic import BaseModel, Field


class Tools:
    class Valves(BaseModel):
        unit: str = Field("EUR", description="what the numbers are")
        api_key: str = ""

    class UserValves(BaseModel):
        digits: int = 2

    def __init__(self):
        self.valves = self.Valves()

    async def add(self, a: float, b: float, __user__: dict = {}, __event_emitter__=None) -> dict:
        """
        Adds two numbers.
        :param a: the first
        :param b: the second
        """
        await __event_emitter__({"type": "status", "data": {"description": "adding", "done": False}})
        print("adding", a, b)
        total = round(a + b, __user__["valves"].digits)
        return {"total": total, "unit": self.valves.unit, "key": self.valves.api_key, "by": __user__["name"]}

    def fail(self) -> str:
        """Fails."""
        raise ValueError("not today")
`

// makeTool creates a Python tool.
func (c *client) makeTool(id, content string, more ...object) answer {
	c.t.Helper()
	form := object{"id": id, "name": id, "content": content, "meta": object{"description": "of the tests"}}
	for _, m := range more {
		for k, v := range m {
			form[k] = v
		}
	}
	return c.post("/api/v1/tools/create", form)
}

func TestAPythonToolFromDiskToAStreamedResult(t *testing.T) {
	s := pythonStack(t)
	made := s.makeTool("calculator", calculator).want(200)
	specs := made.list("specs")
	if len(specs) != 2 || specs[0].str("name") != "add" || !strings.Contains(specs[0].str("description"), "Adds two numbers.") {
		t.Fatalf("got %s", made.body)
	}
	if got := made.obj("meta").obj("manifest").str("title"); got != "Calculator" || made.obj("meta")["has_user_valves"] != true {
		t.Errorf("got %s", made.body)
	}
	if got := s.get("/api/tools/").want(200); !strings.Contains(string(got.body), `"calculator"`) {
		t.Errorf("got %s", got.body)
	}
	if got := s.get("/api/tools/id/calculator/valves/spec").want(200); got.obj("properties")["unit"] == nil {
		t.Errorf("got %s", got.body)
	}
	s.post("/api/tools/id/calculator/valves/update", object{"unit": "GBP", "api_key": "sk-hush-hush"}).want(200)
	if got := s.get("/api/tools/id/calculator/valves").want(200); got.str("unit") != "GBP" || got.str("api_key") != "sk-hush-hush" {
		t.Errorf("got %s", got.body)
	}
	if got := s.post("/api/tools/id/calculator/valves/update", object{"unit": object{"no": "text"}}).want(400); !strings.Contains(got.str("detail"), "unit") {
		t.Errorf("got %s", got.body)
	}
	s.post("/api/tools/id/calculator/valves/user/update", object{"digits": 1}).want(200)
	if got := s.get("/v1/tools?tool_ids=calculator").want(200); !strings.Contains(string(got.body), `"python:calculator"`) {
		t.Errorf("got %s", got.body)
	}

	var names []string
	var last object
	body := object{"stream": true, "tool_ids": []string{"calculator"}, "tool_calls": []object{
		{"id": "c1", "name": "add", "arguments": object{"a": 1.25, "b": "2"}}, {"id": "c2", "name": "fail", "arguments": object{}},
	}}
	err := s.stream(t.Context(), "POST", "/v1/agent-sessions/"+s.session()+"/run", body, "", func(e event) bool {
		names = append(names, e.name)
		if e.name == "call.event" && e.data.obj("data").str("type") != "status" {
			t.Errorf("got the event %v", e.data)
		}
		last = e.data
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names, " "); !strings.Contains(got, "call.event") || !strings.HasSuffix(got, "run.finished") {
		t.Errorf("got the events %s", got)
	}
	calls := last.obj("run").list("calls")
	wantStatus(t, calls[0], "ok")
	value := calls[0].obj("returned").obj("value")
	if value.num("total") != 3.3 && value.num("total") != 3.2 || value.str("unit") != "GBP" || value.str("key") != "sk-hush-hush" || value.str("by") == "" {
		t.Errorf("got %v", calls[0])
	}
	if calls[0].str("stdout") == "" || calls[0].str("result") == "" {
		t.Errorf("got %v", calls[0])
	}
	wantStatus(t, calls[1], "error")
	if got := calls[1]; got.obj("error").str("message") != "ValueError: not today" || !strings.Contains(got.str("stderr"), "Traceback") {
		t.Errorf("got %v", got)
	}
}
